"""Queries of the alerts and the dashboard: their metrics and labels are those of a server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from prometheus_client.core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from greenroom.server.engine.requests import REASONS
from greenroom.server.http.metrics import METRICS, TIMES

DEPLOY = Path(__file__).parents[2] / "deploy"
NAME = re.compile(r"\bgreenroom_\w+")
SELECTOR = re.compile(r"\{([^{}]*)\}")
GROUPING = re.compile(r"\bby \(([^)]*)\)")
OF_PROMETHEUS = {"instance", "job", "le"}
STATE = {"greenroom_up", "greenroom_load_progress", "greenroom_model_info"}
LOAD_S = 60.0


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "greenroom.json").read_text())


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    return group["rules"]


def queries() -> list[str]:
    panels = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
    return [*panels, *(rule["expr"] for rule in rules())]


def labels_of(query: str) -> set[str]:
    """The labels that a query selects or groups by."""
    chosen = [label for part in SELECTOR.findall(query) for label in re.findall(r"(\w+)\s*[=!]",
                                                                                part)]  # fmt: skip
    grouped = [label.strip() for part in GROUPING.findall(query) for label in part.split(",")]
    return {*chosen, *grouped} - OF_PROMETHEUS


def values_of(query: str) -> set[tuple[str, str]]:
    """The labels with fixed values that a query selects, and the values."""
    found = re.findall(r'(\w+)\s*(?:=~?|!=|!~)\s*"([^"$]*)"', query)
    return {
        (label, value)
        for label, values in found
        if label not in OF_PROMETHEUS
        for value in values.split("|")
    }


def defined() -> dict[str, set[str]]:
    """The labels of each sample that the server's code defines."""
    samples: dict[str, set[str]] = {name: set() for name in STATE}
    for kind, name, _, label, _ in METRICS:
        suffix = "_total" if kind is CounterMetricFamily else ""
        samples[f"greenroom_{name}{suffix}"] = {label} - {""}
    for name, _, _ in TIMES:
        samples |= {f"greenroom_{name}_seconds_{part}": set() for part in ("bucket", "count",
                                                                            "sum")}  # fmt: skip
    return samples


@pytest.mark.parametrize("query", queries())
def test_a_query_has_metrics_and_labels_that_the_server_defines(query: str) -> None:
    samples = defined()
    names = NAME.findall(query)
    assert names or query == 'up{job="greenroom"} == 0'
    assert set(names) <= set(samples)
    assert labels_of(query) <= set().union(*(samples[name] for name in names))
    assert query.count("(") == query.count(")")


def test_a_selected_value_is_one_that_the_server_defines() -> None:
    selected = set().union(*map(values_of, queries()))
    assert ("reason", "timeout") in selected
    assert selected <= {("reason", reason) for reason in REASONS}


def test_an_unknown_name_or_label_would_be_seen() -> None:
    assert "greenroom_expert_hit_total" not in defined()
    assert labels_of('sum by (cause) (greenroom_tokens_total{kind="new"})') == {"cause", "kind"}


def test_a_counter_is_always_in_a_rate_or_an_increase() -> None:
    for query in queries():
        for name in re.findall(r"greenroom_\w+_(?:total|bucket)", query):
            pattern = rf"(?:rate|increase)\({name}(?:\{{[^{{}}]*\}})?\["
            assert len(re.findall(pattern, query)) == query.count(name)


def test_panels_and_rules_are_complete() -> None:
    board = dashboard()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    variables = {each["name"] for each in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board["panels"]))) - {"__rate_interval"}
    assert used == variables == {"datasource", "instance"}
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "$labels.instance" in rule["annotations"]["summary"]
    assert len({rule["alert"] for rule in rules()}) == len(rules())


@contextmanager
def served(folder: Path, *options: str) -> Iterator[str]:
    """`greenroom serve demo` with its model loaded; the server's address."""
    command = [sys.executable, "-m", "greenroom", "serve", "demo", "--port", "0", *options]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "GREENROOM_LEARNED": "off"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as server:
        assert server.stderr is not None
        try:
            line = next(line for line in server.stderr if "http://" in line)
            threading.Thread(target=server.stderr.read, daemon=True).start()
            (url,) = re.findall(r"http://[0-9.:]+", line)
            until = time.monotonic() + LOAD_S
            while httpx2.get(f"{url}/health").status_code != 200:
                assert time.monotonic() < until, "the server does not become ready"
                time.sleep(0.1)
            yield url
        finally:
            server.terminate()


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[str]:
    """The metrics of `greenroom serve demo` after one answer."""
    with served(tmp_path, "--memory", "1GiB") as url:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 4}
        assert httpx2.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
        yield httpx2.get(f"{url}/metrics").text


@pytest.mark.process
def test_every_metric_of_a_query_is_exposed_by_a_real_server(scraped: str) -> None:
    exposed = {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(scraped)
        for sample in family.samples
    }
    values = {pair for family in text_string_to_metric_families(scraped)
              for sample in family.samples for pair in sample.labels.items()}  # fmt: skip
    for query in queries():
        names = set(NAME.findall(query))
        assert values_of(query) <= values, query
        assert names <= set(exposed), query
        assert labels_of(query) <= set().union(*(exposed[name] for name in names)), query
