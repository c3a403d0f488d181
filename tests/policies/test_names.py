"""Names and options of policies."""

from __future__ import annotations

import pytest

from greenroom.errors import UnknownName, UsageError
from greenroom.policies import DEFAULT, POLICIES, policy


def test_the_table_has_every_policy_by_its_name():
    assert {
        *("fifo", "lru", "lfu", "lfu-in-cache", "random", "marking", "opt", "llru", "lcp"),
        *("moe-infinity", "static", "s3fifo", "sieve", "arc", "lfuda"),
        *("hobbit", "hybrimoe", "fate"),
    } <= set(POLICIES)
    assert all(policy(name) is chosen for name, chosen in POLICIES.items())
    assert policy("auto").name == DEFAULT


def test_options_follow_the_name():
    chosen = policy("moe-infinity:matching=request,capacity=50")
    assert chosen.settings == {"matching": "request", "capacity": 50, "tolerance": 0.0}
    assert chosen.name == "moe-infinity:matching=request,capacity=50"
    assert policy("moe-infinity").settings == {
        "matching": "iteration",
        "capacity": 100,
        "tolerance": 0.0,
    }
    assert policy("lcp").settings == {"rho": 0.25, "omega": 128}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mru", r"unknown policy 'mru': choose one of auto, lru, fifo, lfu"),
        ("", r"unknown policy ''"),
        ("lru:omega=3", r"policy lru has no options: 'omega=3'"),
        ("lcp:sigma=3", r"unknown option of lcp 'sigma': choose one of rho, omega"),
        ("lcp:omega", r"options of lcp are given once, as name=value: 'omega'"),
        ("lcp:omega=1,omega=2", r"given once, as name=value: 'omega=2'"),
        ("lcp:omega=soon", r"omega of lcp must be a whole number, got 'soon'"),
        ("lcp:rho=much", r"rho of lcp must be a number, got 'much'"),
        ("lcp:rho=2", r"rho of lcp must be between 1e-06 and 1, got 2"),
        ("lcp:rho=nan", r"rho of lcp must be between"),
        ("lcp:omega=0", r"omega of lcp must be at least 1, got 0"),
        (
            "moe-infinity:matching=best",
            r"unknown matching of moe-infinity 'best': .*iteration, req",
        ),
        ("moe-infinity:capacity=0", r"capacity of moe-infinity must be between 1 and"),
    ],
)
def test_a_wrong_name_or_option_raises_an_error_of_one_line(name, message):
    with pytest.raises(UsageError, match=message) as caught:
        policy(name)
    assert "\n" not in str(caught.value)
    if message.startswith("unknown"):
        assert isinstance(caught.value, UnknownName)
