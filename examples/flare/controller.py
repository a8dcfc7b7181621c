"""The server's side of the job: hands out what `vs.Server` wants to be sent, and gives it what comes back."""

import time
from pathlib import Path

import numpy as np
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.workflows.model_controller import ModelController

import veilstream as vs


class Releases(ModelController):
    """One run, from its plan to its horizon."""

    def __init__(self, plan: str, out: str, learners: list[str], keys: str = "") -> None:
        """``plan``: its text, which sites are sent; ``keys``: the server's folder, or "" for none."""
        super().__init__(persistor_id="")
        self.plan, self.out, self.learners, self.keys = plan, out, learners, keys

    def run(self) -> None:
        """Ask every site for what is due until the last has closed its epoch."""
        plan, state = vs.Plan.parse(self.plan), Path(self.out) / "server.state"
        if state.exists():
            self.server = vs.Server.from_bytes(plan, state.read_bytes(), self.keys or None)
        else:
            self.server = vs.Server(plan, self.keys or None, learners=None if self.keys else self.learners)
        self.info(f"veilstream: {self.server.guarantee}")
        wait_s = plan.federation.deadline_s
        began = time.monotonic()
        while self.server.ended != set(self.learners) and not self.abort_signal.triggered:
            for name, request in self.server.requests().items():
                data = FLModel(params={"plan": self.plan, "request": np.frombuffer(request, np.uint8)})
                self.send_model("exchange", data, targets=[name], timeout=int(wait_s), callback=self.take)
            while self.get_num_standing_tasks() and not self.abort_signal.triggered:
                time.sleep(0.1)
            late = time.monotonic() - began > wait_s
            if self.server.complete or (late and self.server.enough):
                self.server.close_round()
                began = time.monotonic()
                self.info(f"veilstream: {self.server.round} of {self.server.rounds} rounds")
                self.keep(state)
            if late and (self.server.finished or not self.server.seated):
                break
        self.keep(state)

    def take(self, result: FLModel) -> None:
        """Give the server a reply; no message may end the run."""
        site = str(result.meta.get("client_name", ""))
        try:
            told = self.server.accept(np.asarray(result.params["reply"], np.uint8).tobytes(), site)
        except (vs.VeilstreamError, KeyError, TypeError) as error:
            self.warning(f"veilstream: {site}: {error}")
            return
        if told.why:
            self.warning(f"veilstream: {site} refuses: {told.why}")

    def keep(self, state: Path) -> None:
        """The state to go on from, and the newest model, for `veilstream predict` and `vs.load`."""
        state.parent.mkdir(parents=True, exist_ok=True)
        self.server.released.save(state.parent / "model.npz")
        state.with_suffix(".new").write_bytes(self.server.to_bytes())
        state.with_suffix(".new").replace(state)
