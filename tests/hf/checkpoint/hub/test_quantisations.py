"""Names of models on the hub, and the files that they select."""

from __future__ import annotations

import pytest

from greenroom.errors import NotAModel
from greenroom.hf.checkpoint.hub.quantisations import quantisations, select
from greenroom.hf.checkpoint.names import HubName, check_name, parse_hub_name

GIB = 1 << 30
REPOSITORY = {
    "README.md": 10,
    "config.json": 20,
    "params": 1,
    "imatrix_unsloth.gguf": GIB,
    "model.imatrix.gguf": GIB,
    "mmproj-F16.gguf": GIB,
    "model-Q4_K_M.gguf": 18 * GIB,
    "model-UD-Q4_K_XL.gguf": 17 * GIB,
    "model-IQ2_XXS.gguf": 8 * GIB,
    "model-mxfp4.gguf": 9 * GIB,
    "Q8_0/model-Q8_0-00002-of-00002.gguf": 12 * GIB,
    "Q8_0/model-Q8_0-00001-of-00002.gguf": 20 * GIB,
    "BF16/model-00001-of-00003.gguf": 30 * GIB,
    "BF16/model-00002-of-00003.gguf": 30 * GIB,
}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", HubName("a/b")),
        ("a/b:Q4_K_M", HubName("a/b", "Q4_K_M")),
        ("a/b@v1.0:q8_0", HubName("a/b", "q8_0", "v1.0")),
        ("a/b:UD-Q4_K_XL@refs/pr/1", HubName("a/b", "UD-Q4_K_XL", "refs/pr/1")),
        ("hf.co/a/b:Q4_K_M", HubName("a/b", "Q4_K_M")),
        ("huggingface.co/a/b", HubName("a/b")),
        ("https://huggingface.co/a/b", HubName("a/b")),
        ("https://hf.co/a/b/tree/main", HubName("a/b")),
        ("https://huggingface.co/a/b/tree/v2/BF16", HubName("a/b", "BF16", "v2")),
        ("https://huggingface.co/a/b/blob/main/x-Q4_0.gguf?x=1", HubName("a/b", "x-Q4_0.gguf")),
        ("https://huggingface.co/a/b?show_file_info=x-Q4_0.gguf", HubName("a/b", "x-Q4_0.gguf")),
        ("https://huggingface.co/a", None),
        ("https://example.com/a/b", None),
        ("a", None), ("a/b/c", None), ("a/b:", None), ("a/b@x@y", None), ("a/b@../../x", None),
        ("a/b:../x", None), ("/a/b", None),
    ],
)  # fmt: skip
def test_names_of_models_on_the_hub(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_a_name_is_written_as_it_is_read() -> None:
    for text in ("a/b", "a/b:Q4_K_M", "a/b@v1", "a/b:Q4_K_M@v1"):
        assert str(parse_hub_name(text)) == text


def test_a_mirror_names_its_own_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_hub_name("https://mirror.example/a/b") is None
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert parse_hub_name("https://mirror.example/a/b") == HubName("a/b")


@pytest.mark.parametrize("text", ["a/b:x-Q4_0.gguf", "a/b@x:Q4_0", "https://hf.co/a/b"])
def test_valid_names_pass_the_early_check(text: str) -> None:
    check_name(text)


def test_an_address_of_another_site_is_refused() -> None:
    with pytest.raises(NotAModel, match="not the page of a model"):
        check_name("https://example.com/a/b")


def test_quantisations_of_a_repository() -> None:
    found = quantisations(REPOSITORY)
    assert [(each.label, each.nbytes // GIB, each.complete) for each in found] == [
        ("IQ2_XXS", 8, True), ("MXFP4", 9, True), ("UD-Q4_K_XL", 17, True), ("Q4_K_M", 18, True),
        ("Q8_0", 32, True), ("BF16", 60, False),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "label"),
    [
        ("Qwen3-30B-A3B-Q4_K_M.gguf", "Q4_K_M"), ("tiny.Q5_0.gguf", "Q5_0"),
        ("a.i1-IQ3_XXS.gguf", "IQ3_XXS"), ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("gpt-oss-20b-MXFP4_MOE.gguf", "MXFP4_MOE"), ("x-UD-IQ1_M.gguf", "UD-IQ1_M"),
        ("ggml-model-q4_0.gguf", "Q4_0"), ("x-TQ1_0.gguf", "TQ1_0"), ("x-fp16.gguf", "FP16"),
        ("F16/x.gguf", "F16"), ("o_x-Q6_K/o_x-Q6_K-00001-of-00001.gguf", "Q6_K"),
        ("x-NVFP4.gguf", "NVFP4"), ("Qwen3-plain.gguf", "Qwen3-plain"),
    ],
)  # fmt: skip
def test_labels_in_the_names_of_files(file: str, label: str) -> None:
    assert [each.label for each in quantisations({file: 1})] == [label]


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (None, "model-Q4_K_M.gguf"),
        ("q4_k_m", "model-Q4_K_M.gguf"),
        ("Q4_K_XL", "model-UD-Q4_K_XL.gguf"),
        ("MXFP4", "model-mxfp4.gguf"),
        ("Q8_0", "Q8_0/model-Q8_0-00001-of-00002.gguf"),
        ("model-IQ2_XXS.gguf", "model-IQ2_XXS.gguf"),
        ("model-Q8_0-00002-of-00002.gguf", "Q8_0/model-Q8_0-00001-of-00002.gguf"),
    ],
)
def test_the_files_of_a_quantisation(text: str | None, first: str) -> None:
    selection = select("a/b", HubName("a/b", text), REPOSITORY)
    assert selection.entry == selection.weights[0] == first
    assert selection.texts == ("README.md", "config.json")
    assert len(selection.weights) == (2 if "Q8_0" in first else 1)


def refusal(text: str | None, sizes: dict[str, int]) -> str:
    with pytest.raises(NotAModel) as error:
        select("a/b", HubName("a/b", text), sizes)
    return str(error.value)


def test_a_missing_quantisation_lists_the_others_with_their_sizes() -> None:
    assert refusal("Q5_K_M", REPOSITORY) == (
        "a/b: this repository has no quantisation Q5_K_M; it has IQ2_XXS (8 GiB), MXFP4 (9 GiB),"
        " UD-Q4_K_XL (17 GiB), Q4_K_M (18 GiB), Q8_0 (32 GiB), BF16 (60 GiB)"
    )


def test_without_a_default_a_quantisation_is_asked_for() -> None:
    sizes = {"x-Q2_K.gguf": GIB, "x-Q8_0.gguf": 2 * GIB}
    assert refusal(None, sizes) == (
        "a/b: give one of this repository's quantisations, such as a/b:Q2_K; it has Q2_K (1 GiB),"
        " Q8_0 (2 GiB)"
    )


def test_one_quantisation_needs_no_name() -> None:
    assert select("a/b", HubName("a/b"), {"x-Q2_K.gguf": 1}).entry == "x-Q2_K.gguf"


def test_file_names_distinguish_models_with_the_same_label() -> None:
    sizes = {"x-Q4_0.gguf": 1, "y-Q4_0.gguf": 2}
    assert "it has x-Q4_0 (1 B), y-Q4_0 (2 B)" in refusal("Q4_0", sizes)
    assert select("a/b", HubName("a/b", "y-q4_0"), sizes).entry == "y-Q4_0.gguf"


def test_a_quantisation_that_lacks_parts_is_refused() -> None:
    text = refusal("bf16", REPOSITORY)
    assert "BF16 lacks files: 2 of 3 parts are there; others: IQ2_XXS (8 GiB)" in text


def test_safetensors_come_before_gguf_files() -> None:
    sizes = {"model.safetensors": 1, "x-Q4_K_M.gguf": 1, "original/model.safetensors": 1,
             "consolidated.safetensors": 1, "tokenizer.model": 1}  # fmt: skip
    selection = select("a/b", HubName("a/b"), sizes)
    assert (selection.texts, selection.weights) == (("tokenizer.model",), ("model.safetensors",))
    assert select("a/b", HubName("a/b", "Q4_K_M"), sizes).entry == "x-Q4_K_M.gguf"
    assert "no GGUF files" in refusal("Q4_K_M", {"model.safetensors": 1})


def test_all_files_of_a_pack_are_selected() -> None:
    sizes = {"greenroom.json": 1, "experts.greenroom": 1, "dense.gguf": 1}
    assert select("a/b", HubName("a/b"), sizes).weights == ("experts.greenroom", "dense.gguf")
