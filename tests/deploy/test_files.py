"""Unit, image and composition: their commands are accepted, and name files that exist."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from greenroom.cli import parser
from greenroom.config import ServeConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "greenroom.service"


def parsed(line: list[str]) -> argparse.Namespace:
    assert Path(line[0]).name == "greenroom"
    return parser().parse_args(line[1:])


def directives(path: Path) -> dict[str, list[str]]:
    """The directives of a unit, by name."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line and line[0] not in "#;[":
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def variables(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / name).read_text())


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


def test_the_unit_starts_a_server_whose_budget_is_a_share_of_its_limit() -> None:
    unit = directives(UNIT)
    (line,) = unit["ExecStart"]
    values = variables(DEPLOY / "systemd" / "greenroom.env")
    for name, value in values.items():
        line = line.replace(f"${{{name}}}", value).replace(f"${name}", value)
    assert "$" not in line
    args = parsed(shlex.split(line.replace("%%", "%")))
    assert args.memory == "90%"
    assert not re.search(r"(?<!%)%(?!%)", unit["ExecStart"][0])  # systemd reads % as a specifier
    assert unit["MemoryMax"] == ["8G"]


def test_the_unit_restarts_after_failures_alone_and_lets_answers_end() -> None:
    unit = directives(UNIT)
    assert unit["Restart"] == ["on-failure"]
    assert unit["RestartPreventExitStatus"] == ["2"]  # of a UsageError
    for wait in (*unit["TimeoutStopSec"], compose()["services"]["greenroom"]["stop_grace_period"]):
        assert seconds(wait) > ServeConfig().grace


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    """The program is replaced by one that exists."""
    text = UNIT.read_text().replace("/opt/greenroom/bin/greenroom", "/bin/true")
    (tmp_path / UNIT.name).write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / UNIT.name)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert UNIT.name not in ran.stderr
    assert ran.returncode == 0, ran.stderr


def test_the_image_copies_files_that_exist_and_are_not_ignored() -> None:
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE)
        for source in line.split()[:-1]
    ]
    assert ignored[0] == "*"
    assert {f"!{source}" for source in copied} == {each for each in ignored if each[0] == "!"}
    assert all((ROOT / source).exists() for source in copied)
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    assert json.loads(entry) == ["greenroom"]
    (check,) = re.findall(r"^HEALTHCHECK .*CMD (\[.*)$", text, re.MULTILINE)
    compile(json.loads(check)[-1], "healthcheck", "exec")


def test_the_compositions_server_is_started_with_options_that_exist() -> None:
    service = compose()["services"]["greenroom"]
    assert (ROOT / "deploy" / service["build"]["context"]).resolve() == ROOT
    assert (ROOT / service["build"]["dockerfile"]).is_file()
    words = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in service["command"]]
    args = parsed(["greenroom", *words])
    assert (args.memory, args.host, args.port) == ("90%", "0.0.0.0", 8000)
    assert args.api_key_file == f"/run/secrets/{service['secrets'][0]}"
    assert service["mem_limit"] == service["memswap_limit"] == "${GREENROOM_MEMORY:-8g}"


def test_prometheus_scrapes_the_server_with_its_key_and_loads_the_rules() -> None:
    services = compose()["services"]
    folder = DEPLOY / services["prometheus"]["volumes"][0].split(":")[0]
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    assert all((folder / name).is_file() for name in config["rule_files"])
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["greenroom:8000"]}]
    assert job["authorization"]["credentials_file"] == "/run/secrets/api-key"
    assert services["prometheus"]["secrets"] == services["greenroom"]["secrets"] == ["api-key"]
    assert job["job_name"] == "greenroom"  # named by an alert


def test_grafana_has_its_data_source_and_the_dashboard() -> None:
    services = compose()["services"]
    grafana, targets = services["grafana"], dict[str, Path]()
    for volume in grafana["volumes"]:
        source, target, *_ = volume.split(":")
        if source.startswith("./"):
            targets[target] = DEPLOY / source
        else:
            assert source in compose()["volumes"]
    folder = targets["/etc/grafana/provisioning"]
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert port == services[host]["ports"][0].split(":")[-1]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((folder / "dashboards/greenroom.yaml").read_text())["providers"]
    dashboards = [path for target, path in targets.items() if provider["options"]["path"] in target]
    assert [json.loads(path.read_text())["title"] for path in dashboards] == ["Greenroom"]
    assert grafana["environment"]["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/api-key"
    assert grafana["secrets"] == ["api-key"]
    assert all(port.startswith("127.0.0.1:") for port in grafana["ports"])


def test_extras_and_arguments_of_the_images_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (DEPLOY / "Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(.*)$", text, re.MULTILINE))
    assert all(re.search(rf"\${name}\b", text) for name in defaults)
    cuda = compose("compose.cuda.yaml")["services"]["greenroom"]
    arguments = cuda["build"]["args"]
    assert arguments.keys() == defaults.keys()
    for extras in (defaults["EXTRAS"], arguments["EXTRAS"]):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
        assert {"serve", "pictures"} <= set(extras.split(","))
    assert "gpu" in arguments["EXTRAS"].split(",")
    assert defaults["TORCH_INDEX"].endswith("/cpu")
    assert not arguments["TORCH_INDEX"].endswith("/cpu")
    (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]


def test_the_server_on_a_gpu_has_the_other_options_of_the_composition() -> None:
    usual, cuda = (compose(name)["services"]["greenroom"]["command"]
                   for name in ("compose.yaml", "compose.cuda.yaml"))  # fmt: skip
    assert [word for word in cuda if word != "--device=cuda"] == usual
    words = [re.sub(r"\$\{\w+:-(.*?)\}", r"\1", word) for word in cuda]
    assert parsed(["greenroom", *words]).device == "cuda"


def test_no_key_is_committed() -> None:
    assert not (DEPLOY / "api-key").exists()
    assert "deploy/api-key" in (ROOT / ".gitignore").read_text().splitlines()
