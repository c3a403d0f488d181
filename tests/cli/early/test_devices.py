"""`--device`: a wrong one is one line, before anything is loaded."""

from __future__ import annotations

import pytest
import torch

from tests.cli.conftest import Run
from tests.models import cached_tiny


@pytest.mark.parametrize(
    ("device", "why"),
    [
        ("cuda:x", "--device cuda:x: write the number of a GPU after cuda:, as cuda:0"),
        (
            "cuda:0,cpu",
            "--device cuda:0,cpu: several devices must all be GPUs with numbers, as cuda:0,cuda:1",
        ),
        ("cuda:99", "--device cuda:99: "),
        ("cuda:0,cuda:99", "--device cuda:0,cuda:99: "),
    ],
)
def test_a_wrong_device_is_one_line(cli: Run, device: str, why: str):
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    assert why in cli("run", folder, "hello", "--device", device, "--cache", "50%").mistake


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line_that_says_what_computes_here(cli: Run):
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    asked = cli("run", folder, "hello", "--device", "cuda", "--memory", "2GiB")
    assert "use --device cpu" in asked.mistake


def test_two_fake_devices_say_what_one_says(cli: Run):
    folder = cached_tiny("qwen3_moe", tokenizer=True)
    asked = ("run", folder, "The green room", "--json", "--temperature", 0, "--max-new-tokens", 4)
    one, two = (
        cli(*asked, "--cache", "50%", "--device", device).json for device in ("cpu", "fake,fake")
    )
    assert one["token_ids"] == two["token_ids"]
    assert [link["link"] for link in two["links"]] == [
        "disk -> host", "host -> fake:0", "host -> fake:1",
    ]  # fmt: skip
