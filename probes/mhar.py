"""What is known about mhar.py besides the model. There is no depth_matrix: each head's weights are for its channels."""
from probes.attnres import costs, neutral, stats  # noqa: F401
