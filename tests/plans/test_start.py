"""A run starts from an earlier model: folder, file or address; what does not fit is named."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

import veilstream as vs
from veilstream.errors import InputError
from veilstream.plans.plan import Plan, PlanError
from veilstream.runs.released_model import model_sha256
from veilstream.runs.start import kept_start, starting_model

DIM = 5
MODEL = np.array([0.5, -1.0, 0.25, 2.0, -0.125], np.float32)


def plan_of(start: str | None = None, **learning) -> Plan:
    given = {"rounds": 4, "learners": 2, **learning}
    return Plan(
        name="air",
        learning=given if start is None else given | {"start": start},
        data={"dim": DIM},
        privacy={"epsilon": 2.0, "delta": 1e-3},
        run={"seeds": 2, "regret": False},
        methods=[{"name": "ours", "mechanism": "buffered", "step_size": 1e-9}],
    )


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "air.npz"
    np.savez(path, model=MODEL, round=np.int64(7), run=np.array("air-1"), plan=np.array("..."))
    return path


def test_a_file_gives_its_model_and_where_it_came_from(file):
    found = starting_model(plan_of(str(file)), DIM)
    np.testing.assert_array_equal(found.model, MODEL)
    assert found.as_dict() == {"start": str(file), "round": 7, "run": "air-1", "sha256": model_sha256(MODEL)}


def test_a_plan_without_a_start_has_none():
    assert starting_model(plan_of(), DIM) is None


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (MODEL[:3], r"a model of 5 numbers, as the task has \(this has 3\)"),
        (MODEL.reshape(1, -1), "not a list of floating-point numbers"),
        (np.arange(5), "not a list of floating-point numbers"),
        (MODEL * np.nan, "finite numbers"),
        (MODEL * np.inf, "finite numbers"),
        (MODEL * 1e9, r"norm at most learning\.model_norm_cap = 1e\+06"),
        (np.array(["a", "b"]), "not a list of floating-point numbers"),
    ],
)
def test_a_model_that_cannot_be_started_from_is_refused_by_name(tmp_path, model, words):
    np.savez(tmp_path / "m.npz", model=model)
    with pytest.raises(InputError, match=rf"learning\.start = .*m\.npz.*{words}"):
        starting_model(plan_of(str(tmp_path / "m.npz")), DIM)


def test_what_is_missing_or_no_model_is_refused_by_name(tmp_path):
    for name, content, words in (
        ("none.npz", None, "No such file"),
        ("text.npz", b"hello", "an array `model`"),
        ("cut.npz", b"PK\x03\x04", "an array `model`"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"learning\.start = .*{name}.*{words}"):
            starting_model(plan_of(str(tmp_path / name)), DIM)
    np.savez(tmp_path / "other.npz", weights=MODEL)
    with pytest.raises(InputError, match="an array `model`"):
        starting_model(plan_of(str(tmp_path / "other.npz")), DIM)
    with pytest.raises(InputError, match="folder of a finished run"):
        starting_model(plan_of(str(tmp_path)), DIM)


def test_a_hash_in_the_plan_pins_the_model(file):
    right = plan_of(str(file), start_sha256=model_sha256(MODEL))
    assert starting_model(right, DIM) is not None
    with pytest.raises(InputError, match=r"learning\.start_sha256 = .*holds another model"):
        starting_model(plan_of(str(file), start_sha256="0" * 64), DIM)
    with pytest.raises(PlanError, match=r"learning\.start_sha256.*expected start beside it"):
        plan_of(start_sha256="0" * 64)
    with pytest.raises(PlanError, match="64 hexadecimal digits"):
        plan_of(str(file), start_sha256="abc")


def test_a_simulation_starts_there_and_a_later_one_from_its_folder(file, tmp_path):
    """The step size is next to nothing, so a model stays where it started."""
    run = vs.run(plan_of(str(file)), tmp_path / "one")
    for seed in (0, 1):
        np.testing.assert_allclose(run.model(seed=seed), MODEL, atol=1e-5)
    said = json.loads((run.path / "start.json").read_text())
    assert (said["sha256"], said["round"]) == (model_sha256(MODEL), 7)
    later = vs.run(plan_of(str(run.path)), tmp_path / "two")
    assert json.loads((later.path / "start.json").read_text()) == {
        "start": str(run.path),
        "round": 4,
        "sha256": model_sha256(run.model()),
    }
    np.testing.assert_allclose(later.model(), run.model(), atol=1e-5)


def test_a_resumed_run_starts_from_what_it_kept(file, tmp_path):
    plan, folder = plan_of(str(file)), tmp_path / "run"

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vs.run(plan, folder, on_prepared=interrupt)
    file.unlink()  # not looked for again
    np.testing.assert_allclose(vs.run(plan, folder, resume=True).model(), MODEL, atol=1e-5)


def test_a_start_that_does_not_fit_claims_no_folder(tmp_path):
    with pytest.raises(InputError, match=r"learning\.start"):
        vs.run(plan_of(str(tmp_path / "none.npz")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_kept_model_that_was_changed_is_refused(file, tmp_path):
    starting_model(plan_of(str(file)), DIM).keep(tmp_path)
    np.testing.assert_array_equal(kept_start(tmp_path), MODEL)
    (tmp_path / "start.f32").write_bytes(np.zeros(DIM, "<f4").tobytes())
    with pytest.raises(InputError, match=r"start\.f32.*do not agree"):
        kept_start(tmp_path)


class Page(BaseHTTPRequestHandler):
    """Answers as a test says, over TLS."""

    status, kind, body = 200, "application/octet-stream", MODEL.tobytes()

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("Content-Type", self.kind)
        self.send_header("veilstream-round", "7")
        self.send_header("Location", "https://127.0.0.1:1/elsewhere")
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def address(tmp_path):
    from veilstream.federation.keys.new_keys import make_keys

    make_keys(tmp_path / "keys", ["127.0.0.1"], ["a"])
    server = HTTPServer(("127.0.0.1", 0), type("OnePage", (Page,), {}))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    keys = tmp_path / "keys/server"
    context.load_cert_chain(keys / "tls.pem", keys / "tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}/model/latest", server.RequestHandlerClass
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_servers_model_is_fetched_if_its_certificate_is_vouched_for(address, tmp_path, monkeypatch):
    url, _ = address
    ca = str(tmp_path / "keys/server/ca.pem")
    found = starting_model(plan_of(url, start_ca=ca), DIM)
    np.testing.assert_array_equal(found.model, MODEL)
    assert found.as_dict()["round"] == 7
    with pytest.raises(InputError, match=r"certificate verify failed.*learning\.start_ca"):
        starting_model(plan_of(url), DIM)
    monkeypatch.setenv("SSL_CERT_FILE", ca)
    assert starting_model(plan_of(url), DIM) is not None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"status": 404}, "answered 404"),
        ({"status": 302}, "answered 302"),
        ({"kind": "text/html"}, "answered 200 with 'text/html'"),
        ({"body": MODEL[:4].tobytes()}, r"20 bytes \(it sent 16\)"),
        ({"body": bytes(1 << 20)}, "more than 20 bytes"),
        ({"body": (MODEL * np.nan).tobytes()}, "finite numbers"),
    ],
)
def test_an_answer_that_is_no_such_model_is_refused(address, tmp_path, answer, words):
    url, page = address
    for name, value in answer.items():
        setattr(page, name, value)
    ca = str(tmp_path / "keys/server/ca.pem")
    with pytest.raises(InputError, match=rf"learning\.start = .*{words}"):
        starting_model(plan_of(url, start_ca=ca), DIM)


@pytest.mark.parametrize("url", ["http://fl.example.org/model/latest", "ftp://x/y", "https:///m"])
def test_only_https_leaves_this_machine(url):
    with pytest.raises(InputError, match="an https address"):
        starting_model(plan_of(url), DIM)


def test_an_address_where_nobody_answers_is_named():
    with pytest.raises(InputError, match=r"a model API that answers.*refused"):
        starting_model(plan_of("https://127.0.0.1:1/model/latest"), DIM)
