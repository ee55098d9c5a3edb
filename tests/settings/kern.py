CASES = [dict(router="softmax", n_expert=8, top_k=4, gate="headwise"), dict(router="tanh", n_expert=4),
         dict(router="sigmoid", n_expert=4, top_k=1, balance_loss=0.0, tie_embeddings=True)]
BAD = [dict(router="x"), dict(top_k=0), dict(n_expert=4, top_k=5), dict(n_expert=0, top_k=0), dict(d_ff=72),
       dict(top_k=3), dict(d_model=20, n_head=2), dict(balance_loss=-0.1)]
MUON = {f"blocks.mlp.experts.{key}.weight" for key in ("w_gate", "w_up", "w_down")}
MIXES = {"blocks.mlp.gamma", "blocks.mlp.router.weight"}
ROUNDING = 1e-12                # of causality: a token more or less gives the experts other numbers of rows
