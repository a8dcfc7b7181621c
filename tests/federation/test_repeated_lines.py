"""What a peer can have written to a log: one line a minute for each reason, and a count."""

from __future__ import annotations

from tests.support.federation import Lines, World, plan_of
from veilstream.federation.repeated_lines import RepeatedLines
from veilstream.federation.server.open_round import OpenRound


def test_a_repeated_line_is_written_once_a_minute_with_its_count():
    now = [0.0]
    lines = RepeatedLines(lambda: now[0])
    assert lines.add("north", "ProtocolError", "first") == "first"
    assert all(lines.add("north", "ProtocolError", f"{i}") is None for i in range(1000))
    assert lines.add("south", "ProtocolError", "other") == "other"
    now[0] = 59.0
    assert lines.due() == []
    now[0] = 60.0
    (line,) = lines.due()
    assert line.startswith("999 (1,000 times in the last 60 s; north")
    now[0] = 120.0
    assert lines.due() == []
    assert lines.add("north", "ProtocolError", "again") == "again"


def test_peers_without_end_take_bounded_memory_and_lines():
    lines = RepeatedLines(lambda: 0.0)
    written = [lines.add(f"peer {i}", "reason", "text") for i in range(10_000)]
    assert sum(line is not None for line in written) <= 1001


def test_ten_thousand_bad_messages_are_one_line_in_the_servers_log_and_all_counted(tmp_path):
    """It was one line each: 14 to 387 GB a day from one peer."""
    with World(tmp_path, plan_of()) as world:
        coordinator, here = world.coordinator(), OpenRound(0.0)
        for _ in range(10_000):
            coordinator._take("a", b"\x00" * 64, here)
        assert sum(coordinator.messages_refused.values()) == 10_000
        assert len(world.notes) == 1


def test_ten_thousand_bad_requests_are_one_line_in_a_learners_log(tmp_path):
    with World(tmp_path, plan_of()).start_all() as world:
        lines = Lines("veilstream.federation.learner.daemon")
        for _ in range(10_000):
            world.daemons["a"].handle(b"\x00" * 64)
        lines.end()
        assert len(lines) == 1
