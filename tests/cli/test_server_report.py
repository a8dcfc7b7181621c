"""A server's report: where it cannot be made, the log says so and the server goes on."""

from __future__ import annotations

import logging

import pytest

from veilstream.errors import InputError
from veilstream.reports import federation_report


@pytest.mark.filterwarnings("ignore::DeprecationWarning:click")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:typer")
@pytest.mark.parametrize(
    "error", [InputError("run", "x", "y", "z"), OSError("disk"), TypeError("a defect"), KeyError()]
)
def test_no_failure_of_a_report_ends_a_server(tmp_path, monkeypatch, caplog, error):
    from veilstream.cli import server  # loads click, which warns of its own names

    (tmp_path / "plan.toml").write_text("")

    def fail(run):
        raise error

    monkeypatch.setattr(federation_report, "write_federation_report", fail)
    with caplog.at_level(logging.WARNING):
        server._report(tmp_path)
    assert "no report" in caplog.text
