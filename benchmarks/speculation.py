"""Speed of answers with `--speculate lookup` compared with none, for texts that repeat or do not.

    python benchmarks/speculation.py bench-data/moe1.7b-zipf1.5 --caches 100% 75% 50% 25%
    python benchmarks/speculation.py bench-data/moe1.7b-zipf1.5 --passes       # times of passes

Each answer is a given text: a logits processor lets the model choose its tokens only, while the
model computes everything as always. So a checkpoint of random numbers gives the tokens of real
text. The texts are made from files of this repository, in tokens of about four characters:

    edit     a file of code, and the answer repeats it with a renamed argument
    extract  a table, and the answer lists some of its rows as JSON
    chat     a question, and the answer is prose of another file

Each repetition answers once with transformers' loop and once with drafts, in turns (A B B A); the
ratios of their tokens/s, and of their CPU seconds a token, are over these pairs, with 95 %
intervals; above 1 drafts are faster. Tokens a pass: those of the answer over the passes that
computed them. With --passes: a pass of r tokens of one sequence.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from common import commit, machine, note, show_ratio, table

import greenroom  # before torch, so that its settings of OpenMP hold
from greenroom.core.speculation.speculation import Speculation
from greenroom.hf.kv.batch import Batch
from greenroom.hf.kv.cache import truncate
from greenroom.hf.kv.draft_pass import MOST_ROWS, DraftPass
from greenroom.hf.text.drafting import DraftedLoop

ROOT = Path(__file__).resolve().parents[1]
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)


def tokens_of(text: str, vocabulary: int) -> list[int]:
    """Token ids of pieces of about four characters; equal pieces have equal ids."""
    pieces = re.findall(r"\s?\w{1,5}|\s+|[^\w\s]", text)
    return [3 + crc32(piece.encode()) % (vocabulary - 3) for piece in pieces]


def texts() -> dict[str, tuple[str, str]]:
    """The prompt and the answer of each kind of text."""
    code = (ROOT / "benchmarks" / "memlimit.py").read_text()[:2600]
    rows = [f"{n:03}, {city}, {n * 37 % 900}" for n, city in enumerate(
        ("Aachen", "Bergen", "Cadiz", "Delft", "Evora", "Faro", "Ghent", "Hull", "Izmir", "Jena")
        * 4)]  # fmt: skip
    extracted = [json.dumps(dict(zip(("id", "city", "value"), row.split(", "), strict=True)))
                 for row in rows[::2]]  # fmt: skip
    prose = (ROOT / "docs" / "systems.md").read_text()
    return {
        "edit": ("Rename an argument in this code.\n" + code, re.sub("command", "argv", code)),
        "extract": ("List every second row as JSON.\n" + "\n".join(rows), "\n".join(extracted)),
        "chat": ("How do systems offload experts?\n", prose[3000:]),
    }


class GivenText:
    """A logits processor that lets a model choose the tokens of a given answer only."""

    def __init__(self, prompt: int, answer: list[int]) -> None:
        self._prompt, self._answer = prompt, answer

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = self._answer[input_ids.shape[1] - self._prompt]
        chosen = torch.full_like(scores, -torch.inf)
        chosen[:, token] = 0
        return chosen


class Clock:
    """A streamer that records when each token came."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []  # wall and CPU seconds

    def put(self, value: torch.Tensor) -> None:
        self.times.append((time.perf_counter(), time.process_time()))

    def end(self) -> None:
        pass


def answer(
    model: Any, prompt: list[int], text: list[int], loop: DraftedLoop | None
) -> tuple[float, float, list[int]]:
    """Answer with a given text.

    Returns tokens/s and tokens per CPU second, both after the first token, and the tokens.
    """
    ids, clock = torch.tensor([prompt]), Clock()
    options = {} if loop is None else loop.options(clock)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=len(text), do_sample=False,
        logits_processor=[GivenText(len(prompt), text)], streamer=clock, pad_token_id=0,
        eos_token_id=None, **options,
    )  # fmt: skip
    times = clock.times[1:]  # the first call is the prompt's
    wall, cpu = ((len(times) - 1) / (times[-1][i] - times[0][i]) for i in (0, 1))
    return wall, cpu, out[0, len(prompt) :].tolist()


def measured(
    model: Any, name: str, prompt: list[int], text: list[int], loop: DraftedLoop, repeats: int
) -> list[str]:
    """Answer with a given text in pairs, with and without drafts.

    Returns tokens/s without drafts, tokens a pass, and the ratios of tokens/s and of CPU seconds.
    """
    pairs, cpu_pairs, a_pass = [], [], []
    for repeat in range(repeats):
        results: dict[bool, list[float]] = {}
        for drafted in (False, True) if repeat % 2 else (True, False):
            loop.speculation = Speculation(MOST_ROWS)  # every answer learns anew
            *results[drafted], tokens = answer(model, prompt, text, loop if drafted else None)
            assert tokens == text
            if drafted:
                counts = loop.speculation.counts
                a_pass.append((len(text) - 1) / (len(text) - 1 - counts.accepted))
                right = f"{counts.accepted} of {counts.drafted} draft tokens right"
        (rate, cpu_rate), (plain, plain_cpu) = results[True], results[False]
        pairs.append((rate, plain))
        cpu_pairs.append((cpu_rate, plain_cpu))
        note(f"{name}: {rate:.1f} tokens/s with drafts, {plain:.1f} without; {right}")
    shown = f"{statistics.median(rate for _, rate in pairs):.1f}"
    return [
        shown, f"{statistics.median(a_pass):.2f}", show_ratio(pairs), show_ratio(cpu_pairs)
    ]  # fmt: skip


@torch.inference_mode()
def compare(model: Any, name: str, args: argparse.Namespace) -> list[Any]:
    """A row of the table: one kind of text."""
    vocabulary = model.config.get_text_config().vocab_size
    prompt, text = (tokens_of(each, vocabulary) for each in texts()[name])
    text = text[: args.tokens]
    loop = DraftedLoop(model)
    if loop.obstacle:
        raise SystemExit(loop.obstacle)
    for each in (loop, None):  # then kernels are warm, and experts are in memory
        answer(model, prompt, text, each)
    shown, a_pass, *ratios = measured(model, name, prompt, text, loop, args.repeats)
    return [name, shown, a_pass, *ratios]


@torch.inference_mode()
def pass_times(model: Any, args: argparse.Namespace) -> str:
    """Times of passes by their number of tokens, and the experts that they need."""
    verify, batch, driver = DraftPass(model), Batch(model), model.greenroom.driver
    if verify.obstacle:
        raise SystemExit(verify.obstacle)
    vocabulary = model.config.get_text_config().vocab_size
    random = torch.Generator().manual_seed(0)
    caches = [batch.cache()]
    batch([torch.randint(3, vocabulary, (64,), generator=random).tolist()], caches)
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    experts: dict[int, list[int]] = {rows: [] for rows in ROWS}
    for repeat in range(args.repeats + 2):
        for rows in ROWS:
            ids = torch.randint(3, vocabulary, (rows,), generator=random).tolist()
            before, begin = driver.scheduler.view.counted().requests, time.perf_counter()
            verify([ids], caches)
            if repeat > 1:
                seconds[rows].append(time.perf_counter() - begin)
                experts[rows].append(driver.scheduler.view.counted().requests - before)
            truncate(caches[0], 64)
    one = statistics.median(seconds[1])
    lines = [
        [rows, f"{1e3 * statistics.median(seconds[rows]):.1f}",
         f"{statistics.median(seconds[rows]) / one:.2f}", f"{statistics.fmean(experts[rows]):.0f}"]
        for rows in ROWS
    ]  # fmt: skip
    return table(("tokens of a pass", "ms", "times one", "experts"), lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--caches", nargs="+", default=["100%", "75%", "50%", "25%"])
    parser.add_argument("--texts", nargs="+", default=list(texts()), choices=list(texts()))
    parser.add_argument("--tokens", type=int, default=200, help="of an answer")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--passes", action="store_true", help="times of passes instead")
    args = parser.parse_args()
    print(f"commit {commit()}; {machine()}; {args.model.name}\n")
    for cache in args.caches:
        model, _ = greenroom.load(str(args.model), cache=cache, context=2048)
        try:
            print(f"{cache} of the experts in slots\n")
            if args.passes:
                print(pass_times(model, args), flush=True)
            else:
                rows = [compare(model, name, args) for name in args.texts]
                header = (
                    "text", "tokens/s without", "tokens a pass", "with / without", "in CPU seconds",
                )  # fmt: skip
                print(table(header, rows), flush=True)
            print()
        finally:
            model.greenroom.detach()


if __name__ == "__main__":
    main()
