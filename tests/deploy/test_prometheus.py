"""Alerts and dashboard in Prometheus itself: rules by promtool, panels over a server under load.

Both programs are Debian's `prometheus`; without them these tests are skipped.
"""

from __future__ import annotations

import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml

from tests.deploy.test_queries import DEPLOY, LOAD_S, dashboard, rules, served

ALERTS, CONFIG = DEPLOY / "prometheus" / "alerts.yml", DEPLOY / "prometheus" / "prometheus.yml"
CASES = Path(__file__).parent / "alerts_test.yml"
WATCH_S = 150.0  # of load, at most
# The queue may be empty. A model whose experts all fit when it is loaded has no predictor.
MAY_REST = "queue", "prefetches"
KEY = "sk-greenroom-test"
HEADERS = {"x-api-key": KEY}
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="there is no promtool: apt-get install prometheus"
)


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)


@needs_promtool
def test_rules_and_settings_are_valid() -> None:
    for arguments in (("rules", str(ALERTS)), ("config", "--syntax-only", str(CONFIG))):
        checked = promtool("check", *arguments)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_promtool
def test_alerts_fire_and_healthy_servers_have_none() -> None:
    tested = promtool("test", "rules", str(CASES))
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
@pytest.mark.parametrize("alert", [rule["alert"] for rule in rules()])
def test_a_rule_that_never_fires_would_be_seen(alert: str, tmp_path: Path) -> None:
    """The cases expect every alert: without one of them they fail."""
    content = yaml.safe_load(ALERTS.read_text())
    (rule,) = [each for each in content["groups"][0]["rules"] if each["alert"] == alert]
    rule["expr"] = f"({rule['expr']}) and vector(0) > 1"
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(content))
    cases = CASES.read_text().replace("../../deploy/prometheus/alerts.yml", "alerts.yml")
    (tmp_path / CASES.name).write_text(cases)
    tested = promtool("test", "rules", str(tmp_path / CASES.name))
    assert tested.returncode != 0
    assert alert in tested.stdout + tested.stderr


@contextmanager
def prometheus(url: str, key: Path, folder: Path) -> Iterator[str]:
    """Prometheus with the alerts, which reads a server every second; the address of its API."""
    content = yaml.safe_load(CONFIG.read_text())
    content["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (job,) = content["scrape_configs"]
    job["authorization"]["credentials_file"] = str(key)
    job["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(content))
    shutil.copy(ALERTS, folder)
    command = [
        "prometheus", f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}", "--web.listen-address=127.0.0.1:0",
    ]  # fmt: skip
    log, end = folder / "log", time.monotonic() + LOAD_S
    with log.open("w") as file, subprocess.Popen(command, stderr=file) as process:
        try:
            while not (found := re.findall(r"address=(127\.0\.0\.1:[1-9]\d*)", log.read_text())):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            while httpx2.get(f"http://{found[0]}/-/ready").status_code != 200:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)
            yield f"http://{found[0]}/api/v1"
        finally:
            process.terminate()


@contextmanager
def load(url: str) -> Iterator[None]:
    """Answers are computed meanwhile, short ones after one prompt, and long ones."""
    ended = threading.Event()

    def ask(body: dict[str, Any]) -> None:
        while not ended.is_set():
            body = {"model": "demo", **body}
            httpx2.post(f"{url}/v1/completions", json=body, headers=HEADERS, timeout=60)

    short = {"prompt": "Once upon a time " * 20, "max_tokens": 8}
    threads = [
        threading.Thread(target=ask, args=(body,))
        for body in (short, short, {"prompt": "Once", "max_tokens": 900})
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def values(api: str, query: str) -> list[float]:
    """Evaluate a query of the dashboard now."""
    query = query.replace("$instance", ".*").replace("$__rate_interval", "30s")
    answer = httpx2.get(f"{api}/query", params={"query": query}, timeout=20)
    assert answer.status_code == 200, answer.text
    return [float(sample["value"][1]) for sample in answer.json()["data"]["result"]]


def problems(api: str) -> list[str]:
    """List queries of panels without finite values, and those of which all values are 0."""
    found = []
    for panel in dashboard()["panels"]:
        for query in (target["expr"] for target in panel["targets"]):
            numbers = values(api, query)
            if not numbers or not all(map(math.isfinite, numbers)):
                found.append(f"{panel['title']}: {query} has {numbers}")
            elif not any(numbers) and not any(each in query for each in MAY_REST):
                found.append(f"{panel['title']}: {query} is 0")
    return found


def states(api: str, field: str) -> dict[str, str]:
    """Return a field of each alert rule, by its name."""
    (loaded,) = httpx2.get(f"{api}/rules", timeout=20).json()["data"]["groups"]
    return {rule["name"]: rule[field] for rule in loaded["rules"]}


@pytest.mark.process
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="there is no prometheus: apt-get install prometheus"
)
def test_panels_have_values_under_load(tmp_path: Path) -> None:
    """What must move under load moves, and only the alert of late answers fires."""
    key = tmp_path / "key"
    key.write_text(KEY)
    key.chmod(0o600)
    options = ("--memory", "1GiB", "--read-limit", "40MB", "--timeout", "3")
    with ExitStack() as stack:
        url = stack.enter_context(served(tmp_path, *options, "--api-key-file", str(key)))
        resized = httpx2.post(
            f"{url}/v1/admin/cache", json={"cache": "25%"}, headers=HEADERS, timeout=60
        )
        assert resized.status_code == 200
        api = stack.enter_context(prometheus(url, key, tmp_path))
        stack.enter_context(load(url))
        end = time.monotonic() + WATCH_S
        while problems(api) or "firing" not in states(api, "state").values():
            assert time.monotonic() < end, (problems(api), states(api, "state"))
            time.sleep(1)
        assert {*states(api, "health").values()} == {"ok"}
        fired = {name for name, state in states(api, "state").items() if state == "firing"}
        assert fired == {"GreenroomErrors"}  # answers took longer than --timeout
        assert values(api, 'sum(greenroom_answers_total{reason="timeout"})') > [0]
