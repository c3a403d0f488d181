"""The smoke table: for every script of `benchmarks/` a command line that ends within seconds.

In arguments `{traces}` is a folder of recordings, `{recording}` one of them, `{gate_inputs}` one
with the inputs of routers, `{root}` a folder of tiny checkpoints, `{model}` one of those, `{pack}`
a pack with split experts, `{shape}` a tiny GGUF file of shapes.py, `{llama}` a substitute for
llama-bench and `{llama_completion}` for llama-completion, `{text}` a text file and `{out}` an empty
folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MATPLOTLIB, LIBCACHESIM = "matplotlib", "libcachesim"


@dataclass(frozen=True)
class Row:
    """A script's command line, and the columns that its output must have.

    `needs` is a package that the script cannot do without, `writes` are files below `{out}`.
    `kind` says how figures are shown: in tables, in sentences, as objects of JSON, or in files.
    """

    script: str
    args: str
    columns: tuple[str, ...] = ()
    needs: str = ""
    writes: tuple[str, ...] = ()
    kind: Literal["table", "text", "json", "files"] = "table"
    limited: bool = False  # runs in a memory cgroup
    then: str = ""  # the script is run once more with these arguments after the others

    @property
    def name(self) -> str:
        names = [arg for arg in self.args.split() if not arg.startswith(("{", "-"))]
        return f"{self.script}-{names[0]}" if self.script in MANY and names else self.script


MANY = ("worker.py", "serve.py", "precision.py", "kernels.py", "plan.py")
SESSION = "--tokens 10 --settle 2 --fill 1 --repeats 1"
PAPER = "--quick --seed 1 --out {out}"
RECORDED = f"{PAPER} --traces {{traces}}"
UNRECORDED = ("llru_zipf", "llru_bounds", "promoe_predictors", "promoe_latency")
REPLAY = f"demo {{recording}} {SESSION}"


def _paper(
    name: str, columns: tuple[str, ...], args: str = "", *, drawn: bool = True,
    more: tuple[str, ...] = (),
) -> Row:  # fmt: skip
    """A script of `papers/`: it writes a table and mostly a figure of its name, and more tables."""
    stem = name.replace("_", "-")
    tables = tuple(f"{each}.md" for each in (stem, *more))
    writes = (*tables, f"{stem}.svg", f"{stem}.png") if drawn else tables
    options = f"{PAPER if name in UNRECORDED else RECORDED} {args}"
    return Row(f"papers/{name}.py", options, columns, MATPLOTLIB, writes)


ROWS = (
    # Checkpoints, and programs that others run.
    Row("checkpoints.py", "{out} --tiny --variants uniform --gguf uniform", kind="files",
        writes=("moe1.7b-uniform/config.json", "moe1.7b-uniform.gguf")),
    Row("replay/checkpoint.py", "{out} --tiny --layers 1", kind="files",
        writes=("olmoe-1/model.safetensors.index.json",)),
    Row("gguf_file.py", "{root}/moe1.7b-zipf1.0.gguf {out}/larger.gguf --layers 9", kind="files",
        writes=("larger.gguf",)),
    Row("shapes.py", "qwen3-30b-a3b {out}/model --tiny --layers 1 --vocabulary 1024"
        " --format safetensors", kind="files",
        writes=("model/config.json", "model/tokenizer.json", "model/model.safetensors.index.json")),
    Row("real_sizes.py", "{shape} --memory 2GB --tokens 4 --threads 1 --disk-bytes 8000000"
        " --peer {llama_completion}",
        ("engine", "memory", "start s", "TTFT s", "TPOT ms", "hits", "process %", "cgroup %"),
        limited=True),
    Row("real_sizes.py", "{shape} --memory 2GB --tokens 4 --threads 1 --disk-bytes 8000000 --floor"
        " --prompt 12",
        ("memory", "prompt GB", "TTFT, reads", "missing MB", "floor ms", "% of floor"),
        limited=True),
    Row("memlimit.py", "64MiB {recording} -- cat {text}", ("wall_s", "cpu_s", "disk_bytes"),
        kind="json", limited=True),
    Row("memory.py", "demo --tokens 4", ("start", "close", "cgroup", "apart"), limited=True),
    Row("worker.py", "greenroom {model} --cache 50% --prompt 8 --tokens 4 --breakdown 1",
        ("prefill_s", "token_s", "load_s", "decode", "breakdown"), kind="json"),
    Row("worker.py", "accelerate {model} --memory 1000000 --prompt 8 --tokens 1",
        ("prefill_s", "token_s", "load_s"), kind="json"),
    # Runs of a model.
    Row("adapters.py", "demo --adapters 1 --out {out}", ("experts", "together", "of one model"),
        writes=("adapter-1/adapter.safetensors", "adapter-1/expert_cfg.json")),
    Row("real_run.py", "demo --tokens 16 --rounds 1 --cache 25%",
        ("model", "memory", "tokens/s", "hit ratio", "verified", "machine")),
    Row("floor.py", "{model} --table", ("floor", "measured")),
    Row("decode.py", "{root} --repeats 1 --tokens 4 --peer-tokens 2 --variants zipf1.0 --threads 1"
        " --engines greenroom llama.cpp"
        " --llama-bench {llama} --share 60 --plot {out}/decode.svg",
        ("variant", "tokens/s", "hit ratio", "% of floor", "x llama.cpp"), limited=True,
        needs=MATPLOTLIB, writes=("decode.svg",)),
    Row("staging.py", "{model} --chunks 2 --turns 1", ("memory of the buffer", "GB/s")),
    Row("resident.py", "{root} --repeats 1 --inner 1 --tokens 4 --threads 1"
        " --engines greenroom transformers llama.cpp"
        " --llama-bench {llama} --prompt 8",
        ("engine", "decode tokens/s", "prefill tokens/s", "greenroom x, decode")),
    Row("formats.py", "{root} --model moe1.7b-zipf1.0 --types BF16 --llama-bench {llama}"
        " --peer fork={llama} --threads 1 --repeats 1 --tokens 4 --prompt 8 --only resident",
        ("everything resident", "Greenroom", "llama.cpp", "x llama.cpp", "fork", "x fork")),
    Row("shared_cores.py", "{shape} --threads 1 --rounds 1 --seconds 0.1 --llama-bench {llama}",
        ("engine", "quiet, tokens/s", "busy, tokens/s", "share", "greenroom's share / its share")),
    Row("bf12.py",
        "{model} --pack {out}/bf12 --shares 50 --rounds 1 --prompt 8 --tokens 4 --fill 1",
        ("slots", "bf16, tokens/s", "bf12", "ratio")),
    Row("batch.py",
        "demo --requests 4 --tokens 4 --prompt 8 --rounds 1 --orders turns sorted --streams",
        ("answers at a time", "tokens/s", "MB read a token")),
    Row("mtp.py", "{out}/glm --tiny --caches 50% --right 0.5 --tokens 12 --repeats 1",
        ("experts in slots", "tokens a pass", "in CPU seconds")),
    Row("bf12.py", "demo --types", ("entropy coder", "codes of 4 bits")),
    Row("pack.py", "{model} --out {out} --kinds int8", ("experts", "packing, s", "floor, s")),
    Row("pressure.py", "demo --cache 100% --limit 1.6GB --take 0.9 --seconds 1 --threads 1"
        " --pressure on", ("pressure", "ended", "release s after first byte", "after short",
        "slots", "back s"), limited=True),
    Row("startup.py", "--repeats 1 --parts help warm --own-cache",
        ("start-up", "first text, s", "end, s")),
    Row("context.py", "demo --contexts 64 128 --tokens 4 --out {out}",
        ("context", "slots", "hit ratio", "TPOT ms"), MATPLOTLIB, ("context.md", "context.svg")),
    Row("kv.py", "demo --contexts 64 128 --tokens 4 --rounds 1 --threads 1 --kinds int8",
        ("context", "kind", "KV cache", "TPOT ms", "prompt s"), MATPLOTLIB),
    Row("kv.py", "demo --memory 3GB --contexts 64 --tokens 4 --rounds 1 --threads 1 --kinds int4",
        ("context", "kind", "slots", "MB read a token"), MATPLOTLIB),
    Row("overhead.py", "{model} --tokens 4 --repeats 1 --variants off markov",
        ("prefetch", "prediction µs", "bookkeeping µs")),
    Row("speculation.py", "{model} --caches 100% 50% --repeats 1 --tokens 24",
        ("text", "tokens/s without", "tokens a pass", "with / without")),
    Row("speculation.py", "{model} --caches 50% --repeats 1 --passes",
        ("tokens of a pass", "ms", "times one", "experts")),
    Row("published.py", "--rows 4 14 --quick",
        ("engine", "card", "published", "Greenroom", "ratio", "without Python", "misses")),
    Row("python_share.py", "{shape} --cache 50% --tokens 4 --threads 1",
        ("model", "slots", "kernels", "waiting", "Python", "share", "us a layer", "calls")),
    Row("gpu_host_work.py", "--tokens 2 --layers 2 --cache 50% 100%",
        ("slots", "hit ratio", "hits us", "deferred us", "misses us", "behind us", "to copy us",
         "graph us"),
        "triton"),
    Row("first_token.py", "{shape} --cache 50% --prompts 8 16 --blocks 8 16 --disk-bytes 8000000",
        ("tokens", "block", "read GB", "disk GB/s", "reads s", "compute s", "TTFT s", "ratio")),
    Row("warm_start.py", "demo --tokens 16", ("model", "start", "load s", "TTFT s", "steady %")),
    Row("goodpred.py", "demo --tokens 8 --predictors markov --distances 1",
        ("prefetch", "accuracy", "fetch rate", "GOODPRED", "stall ms")),
    Row("predict_in.py", "demo --predictors markov --turns 2 --block 2",
        ("prefetch, thread", "TPOT ms", "overtaken", "inline / worker")),
    Row("probes.py", "--layers 8 --experts 32 --top-k 4 --hidden 160", ("warm", "cold")),
    Row("kernels.py", "--encodings int4 --tokens 1 --quick", ("encoded experts", "us/expert")),
    Row("roofline.py", "--quick --turns 1 --formats bf16 q4_0 mxfp4 --plot {out}/roofline.svg",
        ("kernel", "tokens", "GB/s", "Gop/s", "limit", "% of limit"), MATPLOTLIB,
        ("roofline.svg",)),
    Row("kernels.py", "--quick", ("experts", "eager ms", "native ms", "floor")),
    Row("serve.py", "{root} --repeats 1 --prompt 8 --tokens 32 --parts run users turn exact",
        ("times `generate`:", "Eight users", "than cold:", "--batch-invariant"), kind="text"),
    Row("serve.py", "{root} --repeats 1 --prompt 8 --tokens 6 --parts http delay",
        ("--batch-delay", "last TTFT s", "mean TTFT s")),
    Row("prompt_cache.py", "demo --cache 25% --tokens 300 --new 4 --repeats 1",
        ("tokens", "files MB", "without s", "with s", "sooner", "as cached", "as computed")),
    Row("live_page.py", "--seconds 0.5 --rounds 1",
        ("server", "cpu", "loop without", "loop with", "page", "kB/s", "largest frame kB")),
    Row("live_screen.py", "demo --tokens 8 --pairs 1",
        ("terminal", "tokens/s without", "with", "ratio", "ms a frame", "% of a core")),
    Row("soak_serve.py", "demo --minutes 0.1 --users 2",
        ("requests:", "memory of the last quarter", "computed again, 0 different"), kind="text"),
    Row("load.py", "--alone --minutes 0.2 --clients 6",
        ("requests", "TTFT p50 ms", "TPOT p50 ms", "slowdown p50", "p95")),
    Row("plan.py", "demo --out {out}/plan.jsonl --trace {out}/plan.safetensors --rounds 1"
        " --limits 500e6 --choice 0.25 --requests 1",
        ("settings", "measured ms", "planned ms"), then="--table",
        writes=("plan.jsonl", "plan.safetensors")),
    Row("precision.py", "demo --packs same+int4 --folder {out} --rounds 1 --tokens 10 --text {text}"
        " --quality-tokens 24 --read-limit 1GB", ("pack", "misses", "TPOT ms", "inexact")),
    Row("lossy.py", "demo --text {text} --record {text} --quality-tokens 12 --tokens 24 --rounds 2"
        " --keep 0.5 --read-limit 1GB --results {out}/rows.json --figure {out}/lossy.svg",
        ("option", "TPOT ms", "misses a token", "KL", "perplexity"), MATPLOTLIB,
        writes=("rows.json", "lossy.svg")),
    *(Row("versions.py", f"src src {work} --turns 1", ("work", "before / after", "same output"))
      for work in ("decode {model} --cache 50% --tokens 2", "command simulate {recording}"
                   " --capacity 25% --policy lru --limit 30", "serve demo --users 2 --tokens 2")),
    # Simulations of a recording.
    Row("precision.py", "--traces {recording} --tokens 50 --capacity 25%",
        ("capacity", "transfer", "exact", "skip 0.1")),
    Row("budgets.py", "{recording} --capacity 25% --policy lru", ("policy", "slots", "optimal")),
    Row("scheduler_steps.py", "{recording} --capacity 40% --tokens 40 --repeat 2",
        ("policy", "misses a step", "µs a step", "ratio")),
    Row("similarity.py", "{gate_inputs}", ("k", "mean over layers", "least", "most")),
    Row("pins.py", "{recording} --capacity 25% --policy lru", ("policy", "slots", "none", "mixed")),
    Row("split.py", "{recording} --capacity 25% --ratios 1 --tokens 132",
        ("slots", "transfer/compute", "moepic", "mean theta")),
    Row("host_tier.py", "{recording} --tokens 24 --bus 4 --host 50,100",
        ("slots", "bus", "host memory", "whole", "split 0.75")),
    Row("accuracy.py", "demo --out {out}/accuracy.json --distances 1 --every 5",
        ("predictor", "distance", "layer 0", "layer 7"), writes=("accuracy.json",)),
    Row("systems.py", "{recording} --tokens 132 --earlier 132"
        " --systems moepic,moepic+greenroom,hybrimoe,llru,greenroom",
        ("system", "slots", "miss ratio", "TPOT ms", "of llru")),
    Row("simulate.py", "{recording} --capacity 40% --policies lru next-use --repeat 1",
        ("policy", "M requests/s", "libcachesim", "memory/stream"), LIBCACHESIM),
    # Replays: a model routes as the recording says.
    Row("replay/speed.py", f"{REPLAY} --shares 0.25 --ratios 1 --variants reactive markov oracle:2",
        ("resident, transfer / compute", "TPOT ms", "floor ms", "hidden")),
    Row("replay/compare.py", f"{REPLAY} --shares 0.25 --bandwidths 1 --variants reactive markov",
        ("resident", "miss ratio", "simulated", "distance")),
    Row("replay/prefill.py", "demo {recording} --prompt 10 --repeats 1 --shares 0.25 --ratios 1",
        ("variant", "TTFT ms", "computing ms", "x reactive")),
    Row("replay/link.py", "demo {recording} --bandwidths 1 --passes 2 --repeats 1",
        ("link", "carried, GB/s", "x slower with the link")),
    Row("replay/recovery.py", "demo {recording} --requests 4 --tokens 10 --variants reactive eamc",
        ("variant", "requests to recover", "excess of the first")),
    Row("replay/ablation.py", f"{REPLAY} --prompt 10 --policy lru",
        ("regime", "variant", "ms a pass", "x base")),
    Row("replay/ablation.py", f"{REPLAY} --prompt 10 --simulated 2",
        ("regime", "variant", "ms a pass", "x base")),
    Row("replay/segments.py", f"{{pack}} {{recording}} {SESSION} --shares 0.25 --ratios 1"
        " --out {out}/segments.jsonl", ("resident", "ratio", "whole", "split", "theta")),
    # Experiments of the papers.
    _paper("llru_zipf", ("panel", "paper", "here")),
    _paper("llru_bounds", ("theorem", "bound"), more=("llru-exact",)),
    _paper("llru_sweep", ("recording", "order")),
    _paper("llru_spread", ("recording", "LRU / OPT", "LLRU / OPT"), more=("llru-whole",)),
    _paper("eamc_capacity", ("recording", "matching", "LRU", "1 EAM"), more=("eamc-tolerance",)),
    _paper("eamc_groups", ("recording", "groups", "largest group", "drawn order"),
           "--models olmoe-1b-7b"),
    _paper("expert_reuse", ("recording", "by chance", "all requests"), "--models olmoe-1b-7b",
           more=("expert-reuse-share",)),
    _paper("long_context", ("recording", "system"), "--models olmoe-1b-7b"),
    _paper("eamc_layers", ("recording", "matching", "first third"), "--models olmoe-1b-7b"),
    _paper("moe_infinity_systems", ("recording", "system", "35 %", "hits"),
           "--models olmoe-1b-7b", more=("moe-infinity-capacity",)),
    _paper("eamc_cover", ("recording", "EAMs", "needed for 75 %")),
    _paper("eamc_shift", ("recording", "policy", "excess of the first")),
    _paper("moepic_lcp", ("recording", "LRU", "LFU", "LCP at its best")),
    _paper("learned_state", ("recording", "policy", "cold, 25 %", "change"),
           "--models olmoe-1b-7b --requests 1 2", drawn=False),
    _paper("promoe_skew", ("recording", "uses by the top 10 %", "50 %")),
    _paper("promoe_predictors", ("predictor", "FETCHRATE", "GOODPRED"),
           more=("promoe-goodpred",)),
    Row("papers/promoe_latency.py", PAPER, ("machine", "step", "x base", "TPOT ms"), MATPLOTLIB,
        ("promoe-ablation.svg", "promoe-rates.svg", "promoe-systems.md", "promoe-bits.md")),
    Row("papers/promoe_train.py", "--quick --out {out}/demo --work {out}/work", kind="files",
        writes=("demo/k4.predictor", "demo/k4.trace", "demo/earlier.trace")),
    _paper("promoe_batches", ("recording", "batch", "prefill: promoe", "/ static"),
           more=("promoe-batches-misses",)),
    _paper("task_sets", ("recording", "set of a", "counts: covered", "tcess: weight"),
           "--tokens 8 --shots 1", drawn=False),
    Row("papers/task_sets.py", f"{RECORDED} --own {{traces}}/own.trace --tokens 8 --shots 1",
        ("recording", "tcess: covered", "easy-ep: term"), MATPLOTLIB, ("task-sets-own.md",)),
    _paper("batches", ("recording", "answers", "arrival", "two passes"), "--tokens 4", drawn=False),
    _paper("replicas", ("recording", "affinity, ms", "one by one: less"),
           "--models olmoe-1b-7b --tokens 4 --replicas 2 --answers 2", drawn=False),
    _paper("hebf", ("recording", "pass", "by id, ms", "hottest first, ms"), drawn=False),
    _paper("consistency", ("recording", "MoE on every layer", "SRP, 16 tokens"), drawn=False,
           more=("consistency-sizes", "consistency-running", "consistency-experts")),
    _paper("prediction", ("recording", "predictor", "d = 1", "µs a layer"),
           "--models olmoe-1b-7b deepseek-v2-lite --limit 500 --predictors token markov",
           drawn=False),
    Row("papers/moepic_motivation.py", f"{RECORDED} --models olmoe-1b-7b --limit 300 --tokens 40",
        ("recording", "mean ms", "slowest / mean"), MATPLOTLIB,
        ("moepic-caching.svg", "moepic-hit-latency.svg", "moepic-layers.svg")),
    Row("papers/moepic_systems.py", f"{RECORDED} --models olmoe-1b-7b",
        ("recording", "system", "1.25 x"), MATPLOTLIB,
        ("moepic-systems.svg", "moepic-memory.md")),
    Row("papers/moepic_similarity.py", f"{PAPER} --trace {{gate_inputs}}",
        ("layer", "cosine", "predicted of", "accuracy"), MATPLOTLIB,
        ("moepic-similarity.md", "moepic-similarity.svg")),
    _paper("moepic_tau", ("recording", "tau", "misses"),
           "--models olmoe-1b-7b --capacity 25%", drawn=False),
    _paper("moepic_start", ("recording", "halves", "unsplit", "synthetic"),
           "--models olmoe-1b-7b --capacity 25% --ratios 2", drawn=False),
    Row("papers/moepic.py", RECORDED, ("TTFT ms", "TPOT ms", "prefetches begun"), MATPLOTLIB,
        tuple(f"moepic-olmoe-1b-7b-64-{part}.md" for part in
              ("ablation", "ratios", "settings", "zeta"))),
    Row("papers/gap.py", f"{RECORDED} --models olmoe-1b-7b --policies auto;random",
        ("pin step", "olmoe-1b-7b 20/40/60", "mean"), MATPLOTLIB, ("gap-none.md", "gap-step.md")),
    Row("papers/gap.py",
        f"{RECORDED} --models olmoe-1b-7b --policies next-use --learned --pin none",
        ("pin none", "olmoe-1b-7b 20/40/60", "mean"), MATPLOTLIB, ("gap-none.md",)),
    Row("papers/pre_attention.py", PAPER, ("predictor", "accuracy", "saved, of the oracle's"),
        MATPLOTLIB, ("pre-attention.md",)),
    _paper("saved_stalls", ("recording", "predictor", "accuracy", "saved, of the oracle's"),
           "--models olmoe-1b-7b --limit 40", drawn=False),
    _paper("known_routing", ("recording", "0 tokens", "4 tokens"),
           "--models olmoe-1b-7b --tokens 0 4", drawn=False),
    Row("policies/check.py", "next-use --rules", ("keeps the rules",), kind="text"),
    Row("policies/recordings.py", "--help", ("SHA-256",), kind="text"),  # clones are not here
)  # fmt: skip
