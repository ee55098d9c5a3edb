"""Downloads of token shards that go on where an earlier one stopped."""
import fcntl
import http.client
import os
import urllib.error
import urllib.request

import numpy as np
from tqdm import tqdm

from nanodepth.cli import UserError
from nanodepth.data import HEADER, MAGIC, read_shard


def complete(path):
    """Whether a whole shard is there."""
    try:
        return read_shard(path) is not None
    except UserError:
        return False


def fetch_shard(url, part):
    """Downloads a shard to the file `part`, from where an earlier download stopped. Raises UserError in one line."""
    with open(part, "ab") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{part}: another process is downloading it: wait for that one") from None
        if complete(part):
            return
        try:
            request = urllib.request.Request(url, headers={"Range": f"bytes={f.tell()}-"} if f.tell() else {})
            with urllib.request.urlopen(request, timeout=60) as reply:
                if reply.status != 206:                                 # the server sends the whole file
                    f.truncate(0)
                have, todo = f.tell() if reply.status == 206 else 0, int(reply.headers["Content-Length"] or 0)
                with tqdm(total=have + todo, initial=have, desc=part.stem, unit="B", unit_scale=True, disable=None,
                          leave=False) as bar:
                    while chunk := reply.read(2**20):
                        f.write(chunk)
                        bar.update(len(chunk))
            f.flush()
            os.fsync(f.fileno())
        except urllib.error.HTTPError as e:
            if e.code == 416:                                         # nothing after what we have, and that is no shard
                f.truncate(0)
                raise UserError(f"{url}: the partial file {part} does not belong to it, and was emptied: "
                                "run it again") from None
            how = ("run it again later, it goes on where it stopped" if e.code == 429 or e.code >= 500
                   else "check --url and --shards")
            raise UserError(f"{url}: the server says {e.code} {e.reason}: {how}") from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = getattr(e, "reason", None) or e
            raise UserError(f"{url}: download failed ({reason}): run it again, it goes on where it stopped") from None
    size = part.stat().st_size
    try:
        read_shard(part)
    except UserError as e:
        start = np.fromfile(part, "<i4", 3)
        if len(start) == 3 and start[0] == MAGIC and size < 4 * HEADER + 2 * int(start[2]):
            raise UserError(f"{url}: connection ended early, {size:,} bytes are here: run it again, "
                            "it goes on where it stopped") from None
        part.unlink()                                                   # nothing to go on from
        raise UserError(f"{url}: {str(e).removeprefix(f'{part}: ')}") from None
