"""data_prep.py fineweb-edu against a local web server. Offline."""
import http.server
import threading

import numpy as np
import pytest

import data_prep
from folders import shard_bytes
from nanodepth.cli import UserError
from nanodepth.data import Data


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves self.server.files; `cut`: of one file only that many bytes."""

    def do_GET(self):
        server, name = self.server, self.path.rpartition("/")[2]
        server.log.append(name)
        if name not in server.files:
            return self.send_error(404)
        raw = server.files[name]
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[:server.cut] if name.endswith("000002.bin") else raw)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")              # the GPT-2 vocabulary is out of reach, at once
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {f"finewebedu_train_{i:06d}.bin": shard_bytes([50256, *range(i, i + 3000)]) for i in (1, 2, 3)}
    server.files["finewebedu_val_000000.bin"] = shard_bytes([50256, 5, 6])
    server.log, server.cut = [], None
    server.url = f"http://127.0.0.1:{server.server_port}/some/folder"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(tmp_path, server, monkeypatch):
    with monkeypatch.context() as patch:                                # with the vocabulary at hand
        patch.setattr(data_prep, "load_tokenizer", lambda name: name)
        patch.setattr(data_prep, "token_bytes", lambda tokenizer: np.arange(50257))
        data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    names = ["finewebedu_train_000001.bin", "finewebedu_train_000002.bin", "finewebedu_val_000000.bin"]
    assert server.log == names
    assert sorted(path.name for path in (tmp_path / "fw").iterdir()) == [
        *names, "meta.json", "shards_index.json", "token_bytes.npy"]
    assert all((tmp_path / "fw" / name).read_bytes() == server.files[name] for name in names)
    data = Data(tmp_path / "fw")
    assert (data.tokenizer, data.vocab_size, data.n_train, data.n_val) == ("gpt2", 50257, 6002, 3)
    assert data.token_bytes.sum() == 50257 * 50256 // 2
    server.log.clear()                                                  # one shard more
    data_prep.download_fineweb_edu(tmp_path / "fw", 3, server.url + "/")
    assert server.log == ["finewebedu_train_000003.bin"] and Data(tmp_path / "fw").n_train == 9003
    monkeypatch.setenv("HOME", str(tmp_path))
    data_prep.download_fineweb_edu("~/copy", 2, (tmp_path / "fw").as_uri())                     # from a folder
    assert Data(tmp_path / "copy").n_train == 6002
    (tmp_path / "copy" / names[0]).write_bytes(server.files[names[1]])                          # it has changed since
    with pytest.raises(UserError, match=f"{names[0]}: its content is not what meta.json says"):
        data_prep.download_fineweb_edu("~/copy", 2, server.url)


@pytest.mark.parametrize("raw, said", [
    (None, "404"), (b"<html>no</html>", "not a token shard"), (shard_bytes([1, 2, 3], count=2), "header says 2 tokens"),
    ("cut off", "000002.bin: download failed")])
def test_a_download_that_fails(tmp_path, server, refused, raw, said):
    """What is there is kept, the folder cannot train until all of it is, and then the same command goes on."""
    first, name = [f"finewebedu_train_{i:06d}.bin" for i in (1, 2)]
    good, words = server.files.pop(name), ("fineweb-edu", "--shards", "2", "--url", server.url, "--out", "fw")
    server.files |= {name: good if raw == "cut off" else raw} if raw else {}
    server.cut = 2000 if raw == "cut off" else None
    (tmp_path / "fw").mkdir()
    (tmp_path / "fw" / first).write_bytes(server.files[first])
    assert said in (line := refused("data_prep.py", *words, main=data_prep.main)) and name in line
    with pytest.raises(UserError, match="no val shard"):
        Data(tmp_path / "fw")
    server.files[name], server.cut = good, None
    server.log.clear()
    data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    assert server.log == [name, "finewebedu_val_000000.bin"] and (tmp_path / "fw" / name).read_bytes() == good
