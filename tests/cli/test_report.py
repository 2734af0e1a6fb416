"""``longshore report``: a page for people, JSON for programs."""

from __future__ import annotations

import getpass
import json
import platform


def test_a_page(cli):
    ran = cli("report", "--quick")
    assert (ran.code, ran.err) == (0, "")
    for said in ("software", "CPU", "memory", "measured", "AdamW on the host", "GB/s"):
        assert said in ran.out
    assert "likely problems" in ran.out
    assert platform.node() not in ran.out and f"/{getpass.getuser()}" not in ran.out


def test_json(cli):
    ran = cli("report", "--no-measure", "--json")
    assert (ran.code, ran.err) == (0, "")
    found = json.loads(ran.out)
    assert found["figures"] is None
    assert found["machine"]["memory"]["total_bytes"] > 0
    assert all(set(finding) == {"what", "do"} for finding in found["findings"])
    assert "memory, copy" not in cli("report", "--no-measure").out
