"""data_prep.py fineweb-edu against a local web server. Offline."""
import hashlib
import http.server
import re
import threading

import pytest

import data_prep
from folders import main, shard_bytes
from nanodepth.cli import UserError
from nanodepth.data import Data


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves self.server.files: `cut` sends only that many bytes; `ranges` can be off."""

    def do_GET(self):
        server, name = self.server, self.path.rpartition("/")[2]
        server.log.append((name, self.headers.get("Range")))
        if name not in server.files:
            return self.send_error(404)
        raw, start = server.files[name], 0
        if server.ranges and (wish := self.headers.get("Range")):
            start = int(re.fullmatch(r"bytes=(\d+)-", wish)[1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(raw) - start))
        self.end_headers()
        self.wfile.write(raw[start:start + server.cut] if server.cut and name.endswith("000002.bin") else raw[start:])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")              # the GPT-2 vocabulary is out of reach, at once
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files = {f"finewebedu_train_{i:06d}.bin": shard_bytes([50256, *range(i, i + 3000)]) for i in (1, 2, 3)}
    server.files["finewebedu_val_000000.bin"] = shard_bytes([50256, 5, 6])
    server.log, server.cut, server.ranges = [], None, True
    server.url = f"http://127.0.0.1:{server.server_port}/some/folder"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_download(tmp_path, server, monkeypatch):
    meta = data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    names = ["finewebedu_train_000001.bin", "finewebedu_train_000002.bin", "finewebedu_val_000000.bin"]
    assert sorted(meta["shards"]) == names and not list(tmp_path.glob("fw/*.part"))
    for name in names:
        assert (tmp_path / "fw" / name).read_bytes() == server.files[name]
        assert meta["shards"][name]["sha256"] == hashlib.sha256(server.files[name]).hexdigest()
    data = Data(tmp_path / "fw")
    assert (data.tokenizer, data.vocab_size, data.n_train, data.n_val) == ("gpt2", 50257, 6002, 3)
    assert meta["splits"]["train"]["tokens"] == 6002 and meta["splits"]["train"]["documents"] == 2
    server.log.clear()                                                  # one shard more
    assert len(data_prep.download_fineweb_edu(tmp_path / "fw", 3, server.url + "/")["shards"]) == 4
    assert [name for name, _ in server.log] == ["finewebedu_train_000003.bin"]
    monkeypatch.setenv("HOME", str(tmp_path))
    meta = data_prep.download_fineweb_edu("~/copy", 2, (tmp_path / "fw").as_uri())              # from a folder
    assert sorted(meta["shards"]) == names and Data(tmp_path / "copy").n_train == 6002


@pytest.mark.parametrize("ranges", [True, False])
def test_download_interrupted_and_resumed(tmp_path, server, ranges):
    server.cut, server.ranges = 2000, ranges
    with pytest.raises(UserError, match="000002.bin: connection ended early, 2,000 bytes") as e:
        data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    assert "\n" not in str(e.value)
    with pytest.raises(UserError, match="unfinished download"):
        Data(tmp_path / "fw")
    server.cut = None
    server.log.clear()
    data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)
    assert server.log == [("finewebedu_train_000002.bin", "bytes=2000-")]
    assert (tmp_path / "fw/finewebedu_train_000002.bin").read_bytes() == server.files["finewebedu_train_000002.bin"]
    assert Data(tmp_path / "fw").n_train == 6002


@pytest.mark.parametrize("raw, words", [
    (None, "404"), (b"<html>no</html>", "not a token shard"), (shard_bytes([1, 2, 3], count=2), "not a token shard")])
def test_download_errors(tmp_path, server, monkeypatch, capsys, raw, words):
    name = "finewebedu_train_000002.bin"
    good = server.files.pop(name)
    server.files |= {name: raw} if raw else {}
    code, _, err = main(monkeypatch, capsys, tmp_path, "fineweb-edu", "--shards", 2, "--url", server.url, "--out", "fw")
    assert code == 2 and words in err and name in err and err.count("\n") == 1, err
    with pytest.raises(UserError, match="unfinished download"):
        Data(tmp_path / "fw")
    server.files[name] = good                                           # corrected: the same command works
    assert len(data_prep.download_fineweb_edu(tmp_path / "fw", 2, server.url)["shards"]) == 3
