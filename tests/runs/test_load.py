"""Loading from everything that has a model: runs, servers, files; and from what has none."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import veilstream as vs
from tests.support.federation import DIM, FEATURES, World, rows_of, source_of, table_plan_of
from tests.support.models import plan_of, released
from veilstream.errors import InputError, VeilstreamError
from veilstream.federation.server.model_api import ModelApi
from veilstream.runs.released_model import ReleasedModel, packed

PLAN = """
name = "small"
[learning]
rounds = 3
local_steps = 2
learners = 2
[data]
dim = 4
[privacy]
epsilon = 2.0
delta = 1e-3
[run]
seeds = 2
[[methods]]
name = "ours"
mechanism = "buffered"
step_size = 0.1
averaging = 2.0
[[methods]]
name = "free"
kind = "noise-free"
step_size = 0.1
"""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    return vs.run(vs.Plan.parse(PLAN), tmp_path_factory.mktemp("simulated") / "run")


def test_a_simulations_model_by_method_and_seed(simulated, tmp_path):
    first, second = simulated.summary["seeds"]
    main = simulated.summary["main_method"]
    for source in (simulated, simulated.path, str(simulated.path / "models.npz")):
        model = vs.load(source)
        np.testing.assert_array_equal(model.parameters, simulated.model())
        assert (model.method, model.simulated, model.round, model.rounds) == (main, True, 3, 3)
        assert model.guarantee == simulated.simulation.methods[main].guarantee
        assert model.plan == simulated.plan
    free = vs.load(simulated, method="free", seed=second)
    np.testing.assert_array_equal(free.parameters, simulated.model("free", second))
    assert free.guarantee is None
    alone = tmp_path / "alone.npz"
    shutil.copy(simulated.path / "models.npz", alone)
    np.testing.assert_array_equal(vs.load(alone, method="free").parameters, simulated.model("free", first))
    np.testing.assert_array_equal(ReleasedModel.load(alone).model, simulated.model())  # one format for all
    assert model.predict(np.eye(4)).shape == (4,)
    with pytest.raises(InputError, match="did you mean 'free'"):
        vs.load(simulated, method="fre")
    with pytest.raises(InputError, match=rf"seed = 99: expected one of \[{first}, {second}\]"):
        vs.load(simulated, seed=99)


def test_a_folder_of_version_0_6_is_read(simulated, tmp_path):
    folder = tmp_path / "old"
    shutil.copytree(simulated.path, folder)
    plain = {
        name: np.stack([simulated.model(name, s) for s in simulated.summary["seeds"]]) for name in ("ours", "free")
    }
    (folder / "models.npz").write_bytes(packed(plain))
    for source in (folder, folder / "models.npz"):
        np.testing.assert_array_equal(vs.load(source, method="free").parameters, simulated.model("free"))
        assert vs.load(source).guarantee == vs.load(simulated).guarantee
    np.testing.assert_array_equal(vs.Run(folder).model("ours"), simulated.model("ours"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A federation on records of a table after three of four rounds, and its model API."""
    root = tmp_path_factory.mktemp("served")
    plan = table_plan_of(rounds=4, method={"averaging": 2.0})
    with World(root, plan) as world:
        for name in world.names:
            world.start(name, source=source_of(rows_of([f"{name}{i}" for i in range(8)])))
        coordinator = world.coordinator()
        coordinator.go(world.transport(), 3)
        keys = root / "keys/server"
        api = ModelApi(coordinator, plan, ("127.0.0.1", 0), (keys / "tls.pem", keys / "tls.key"))
        yield root, coordinator, f"https://127.0.0.1:{api.port}", keys / "ca.pem"
        api.close()


def test_a_servers_folder_and_its_url_give_one_model(served):
    root, coordinator, url, ca = served
    published = coordinator.models.read(3)
    assert np.abs(published - coordinator.fold.x).max() > 1e-3  # what is published is an average
    rows = rows_of([f"q{i}" for i in range(40)])
    (root / "model.npz").unlink(missing_ok=True)
    vs.load(root / "run").save(root / "model.npz")
    loaded = [vs.load(root / "run"), vs.load(url, ca=ca), vs.load(root / "model.npz")]
    scores = np.array([[row[name] for name in FEATURES] for row in rows]) @ published.astype(float) / np.sqrt(DIM)
    for model in loaded:
        np.testing.assert_array_equal(model.parameters, published)
        assert (model.round, model.rounds, model.run, model.simulated) == (3, 4, coordinator.run, False)
        assert model.guarantee == coordinator.terms.guarantee
        np.testing.assert_allclose(model.predict_proba(rows)[:, 1], 1 / (1 + np.exp(-scores)), atol=1e-6)
    older = vs.load(f"{url}/model/1", ca=ca)
    np.testing.assert_array_equal(older.parameters, coordinator.models.read(1))
    with pytest.raises(InputError, match="method = 'ours': expected nothing"):
        vs.load(root / "run", method="ours")
    with pytest.raises(InputError, match="ca = "):
        vs.load(root / "run", ca=ca)


def test_a_row_that_is_not_durable_is_not_loaded(served, tmp_path):
    root, coordinator, _, _ = served
    copy = tmp_path / "run"
    shutil.copytree(root / "run", copy)
    with (copy / "models.f32").open("ab") as file:
        file.write(np.full(DIM, 9.0, "<f4").tobytes())  # as a kill between row and checkpoint leaves it
    np.testing.assert_array_equal(vs.load(copy).parameters, coordinator.models.read(3))
    (copy / "models.f32").write_bytes((copy / "models.f32").read_bytes()[: 4 * DIM * 3])
    with pytest.raises(InputError, match="the model of round 3"):
        vs.load(copy)


def test_what_has_no_model_is_refused_by_name(tmp_path, simulated):
    plan = plan_of("logistic")
    whole = released(plan).to_bytes()
    arrays = released(plan).arrays()
    bad = {
        "text.npz": b"hello",
        "empty.npz": b"",
        "cut.npz": whole[: len(whole) // 2],
        "later.npz": packed(arrays | {"format": np.int64(2)}),
        "short.npz": packed(arrays | {"model": arrays["model"][:-1]}),
        "nan.npz": packed(arrays | {"model": arrays["model"] * np.nan}),
        "whole.npz": packed(arrays | {"model": arrays["model"].astype(np.int64)}),
        "plan.npz": packed(arrays | {"plan": np.array("name = 3")}),
        "key.npz": packed(arrays | {"plan": np.array(plan.to_toml() + "\nfuture_key = 1\n")}),
        "promise.npz": packed(arrays | {"guarantee": np.array('{"epsilon": "none"}')}),
        "list.npz": packed(arrays | {"guarantee": np.array("[1]")}),
        "absent.npz": packed({k: v for k, v in arrays.items() if k != "plan"}),
    }
    import io

    squeezed = io.BytesIO()
    np.savez_compressed(squeezed, **(arrays | {"model": np.zeros(10_000_000, np.float32)}))
    bad["bomb.npz"] = squeezed.getvalue()
    pickled = io.BytesIO()
    np.savez(pickled, **(arrays | {"run": np.array([{"a": 1}], object)}))
    bad["pickle.npz"] = pickled.getvalue()
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InputError, match=rf"model = .*{name}"):
            vs.load(tmp_path / name)
    with pytest.raises(InputError, match=r"format 1, not 2 \(another version"):
        vs.load(tmp_path / "later.npz")
    for source in (tmp_path / "none.npz", "/dev/zero", tmp_path):
        with pytest.raises(InputError):
            vs.load(source)
    folder = tmp_path / "unfinished"
    folder.mkdir()
    shutil.copy(simulated.path / "plan.toml", folder)
    with pytest.raises(InputError, match="it has not ended"):
        vs.load(folder)
    broken = tmp_path / "broken"
    shutil.copytree(simulated.path, broken)
    content = (broken / "models.npz").read_bytes()
    (broken / "models.npz").write_bytes(content[:-100])
    with pytest.raises(InputError, match=r"models\.npz"):
        vs.load(broken)


def test_a_url_that_answers_something_else_is_refused(tmp_path):
    import http.server
    import threading

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>welcome</html>")

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        with pytest.raises(InputError, match=rf"model = '{at}'.*address of a model API"):
            vs.load(at)
        server.shutdown()
    with pytest.raises(VeilstreamError, match="is the server running"):
        vs.load(at)
    with pytest.raises(InputError, match="https, except to this machine"):
        vs.load("http://example.org")
