"""Models as people have them: folders, ids of the cache, files of weights, exported programs; and what is
refused in words.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from effcompile.core.errors import EffcompileError, InputsError, UsageError
from effcompile.loader.reading import load
from effcompile.loader.source import Reading, find
from effcompile.loader.weights import check_source

transformers = pytest.importorskip("transformers")

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of three classes, of at most 24 tokens."""
    folder = tmp_path_factory.mktemp("bert")
    config = transformers.BertConfig(vocab_size=99, max_position_embeddings=24, num_labels=3, **SIZES)
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


@pytest.fixture
def copied(bert: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bert, tmp_path / "copied"))


def configured(folder: Path, **changes: object) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@pytest.mark.parametrize("spelled", ["", "/model.safetensors"])
def test_a_folder_and_its_file_are_the_model_that_transformers_loads(bert: Path, spelled: str) -> None:
    loaded = load(f"{bert}{spelled}")
    ids, mask = loaded.kwargs["input_ids"], loaded.kwargs["attention_mask"]
    assert ids.shape == mask.shape == (1, 24)
    assert int(ids.max()) < 99
    model = transformers.BertForSequenceClassification.from_pretrained(bert).eval()
    with torch.no_grad():
        assert torch.equal(loaded.model(**loaded.kwargs).logits, model(ids, attention_mask=mask).logits)
    assert not loaded.model.training
    assert "input_ids [1 × 24] int64" in str(loaded.notes[0])


def test_the_task_and_the_shape(bert: Path) -> None:
    loaded = load(str(bert), Reading(task="fill-mask", shape=(2, 7)))
    assert type(loaded.model).__name__ == "BertForMaskedLM"
    assert loaded.kwargs["input_ids"].shape == (2, 7)
    assert any("set at random: cls.predictions" in str(note) for note in loaded.notes)


def test_labels_are_derived_for_a_training_step(bert: Path) -> None:
    loaded = load(str(bert), Reading(training=True, shape=(4, 8)))
    assert loaded.kwargs["labels"].shape == (4,)
    assert torch.isfinite(loaded.model(**loaded.kwargs).loss)


def test_the_dtype_is_as_stored_and_no_cache_is_kept(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).to(torch.bfloat16).save_pretrained(tmp_path)
    for spelled in (tmp_path, tmp_path / "model.safetensors"):
        loaded = load(str(spelled), Reading(training=True))
        assert loaded.model.dtype is torch.bfloat16
        assert torch.equal(loaded.kwargs["labels"], loaded.kwargs["input_ids"])
        assert "past_key_values" not in loaded.model(**loaded.kwargs)
        assert any("use_cache" in str(note) for note in loaded.notes)
    told = load(str(tmp_path), Reading(cache=True))
    assert told.model.config.use_cache and not any("use_cache" in str(note) for note in told.notes)


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (
            lambda: transformers.ViTForImageClassification(
                transformers.ViTConfig(image_size=16, patch_size=8, **SIZES)
            ),
            {"pixel_values"},
        ),
        (
            lambda: transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2)
            ),
            {"input_ids", "attention_mask", "decoder_input_ids"},
        ),
    ],
    ids=["image", "encoder and decoder"],
)
def test_inputs_of_other_families(model: object, names: set[str], tmp_path: Path) -> None:
    model().save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = load(str(tmp_path))
    assert set(loaded.kwargs) == names
    with torch.no_grad():
        loaded.model(**loaded.kwargs)


def sentence_folder(bert: Path, folder: Path, *, ways: tuple[str, ...], dense: bool = False) -> str:
    shutil.copytree(bert, folder)
    parts = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Dense", "Dense")] * dense),
        ("3_Normalize", "Normalize"),
    ]
    listed = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{k}"}
        for i, (p, k) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({f"pooling_mode_{way}": True for way in ways})
    )
    if dense:
        from safetensors.torch import save_file

        (folder / "2_Dense").mkdir()
        activation = {
            "in_features": 32,
            "out_features": 5,
            "activation_function": "torch.nn.modules.activation.Tanh",
        }
        (folder / "2_Dense" / "config.json").write_text(json.dumps(activation))
        save_file(
            {"linear.weight": DENSE, "linear.bias": torch.zeros(5)}, folder / "2_Dense" / "model.safetensors"
        )
    return str(folder)


DENSE = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))


def by_hand(states: torch.Tensor, mask: torch.Tensor, way: str) -> torch.Tensor:
    """One text's vector, text by text."""
    vectors = []
    for text, kept in zip(states, mask.bool(), strict=True):
        real = text[kept]
        vectors.append(
            {
                "cls_token": text[0],
                "max_tokens": real.max(dim=0)[0],
                "mean_tokens": real.mean(dim=0),
                "lasttoken": real[-1],
                "mean_sqrt_len_tokens": real.sum(dim=0) / len(real) ** 0.5,
            }[way]
        )
    return torch.stack(vectors)


@pytest.mark.parametrize(
    "way", ["cls_token", "max_tokens", "mean_tokens", "mean_sqrt_len_tokens", "lasttoken"]
)
@pytest.mark.parametrize("dense", [False, True])
def test_sentence_transformers(bert: Path, tmp_path: Path, way: str, dense: bool) -> None:
    loaded = load(sentence_folder(bert, tmp_path / "folder", ways=(way,), dense=dense))
    ids = torch.randint(99, (2, 6))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        states = (
            transformers.BertModel.from_pretrained(bert).eval()(ids, attention_mask=mask).last_hidden_state
        )
        wanted = by_hand(states, mask, way)
        wanted = torch.tanh((wanted.unsqueeze(1) * DENSE).sum(dim=-1)) if dense else wanted
        found = loaded.model(ids, mask)
    torch.testing.assert_close(found, wanted / wanted.norm(dim=-1, keepdim=True), atol=2e-6, rtol=1e-5)


def test_a_sentence_module_that_is_not_known(bert: Path, tmp_path: Path) -> None:
    folder = sentence_folder(bert, tmp_path / "folder", ways=("mean_tokens",))
    text = (tmp_path / "folder" / "modules.json").read_text()
    (tmp_path / "folder" / "modules.json").write_text(
        text.replace("models.Normalize", "models.WeightedLayerPooling")
    )
    with pytest.raises(UsageError, match="WeightedLayerPooling"):
        load(folder)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(50, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table(ids))


def test_an_exported_program(tmp_path: Path) -> None:
    model, ids = Tokens().eval(), torch.randint(50, (2, 8))
    torch.export.save(torch.export.export(model, (ids,)), tmp_path / "tokens.pt2")
    loaded = load(str(tmp_path / "tokens.pt2"))
    with torch.no_grad():
        assert torch.equal(loaded.model(*loaded.args), model(ids))
    content = (tmp_path / "tokens.pt2").read_bytes()
    (tmp_path / "cut.pt2").write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match="cut off"):
        load(str(tmp_path / "cut.pt2"))


def test_an_exported_program_with_a_pickle_in_it(tmp_path: Path) -> None:
    """What torch would unpickle is looked for before torch opens the file."""
    import zipfile

    with zipfile.ZipFile(tmp_path / "evil.pt2", "w") as archive:
        archive.writestr(
            "evil/data/weights/model_weights_config.json", json.dumps({"config": {"w": {"use_pickle": True}}})
        )
        archive.writestr("evil/version", "3")  # without it torch does not open it at all
    with pytest.raises(UsageError, match="--allow-pickle"):
        load(str(tmp_path / "evil.pt2"))


FILES = {
    "an embedding": ("nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2))", (1, 128), "embedding"),
    "a linear": ("nn.Sequential(nn.Linear(6, 4))", (1, 6), "linear"),
    "a convolution": ("nn.Sequential(nn.Conv2d(3, 4, 3))", (1, 3, 224, 224), "convolution"),
    "an encoder": ("nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1)", (32, 1, 8), "d_model"),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_defines_only_a_model(kind: str, tmp_path: Path) -> None:
    made, shape, said = FILES[kind]
    (tmp_path / "model.py").write_text(f"from torch import nn\nmodel = {made}\n")
    loaded = load(str(tmp_path / "model.py"))
    assert tuple(loaded.args[0].shape) == shape
    assert said in str(loaded.notes[0])
    loaded.model(*loaded.args)


def test_a_file_of_nanogpts_kind(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(NANO)
    loaded = load(str(tmp_path / "model.py"), Reading(training=True))
    assert loaded.kwargs["idx"].shape == loaded.kwargs["targets"].shape == (1, 16)
    assert "targets" not in load(str(tmp_path / "model.py")).kwargs


NANO = """
import types
from torch import nn
from torch.nn import functional as F
class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.table, self.head = config, nn.Embedding(32, 8), nn.Linear(8, 32)
    def forward(self, idx, targets=None):
        logits = self.head(self.table(idx))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
model = GPT(types.SimpleNamespace(vocab_size=32, block_size=16))
"""


def test_a_model_that_tells_nothing_of_its_inputs(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from torch import nn\nmodel = nn.Bilinear(4, 4, 2)\n")
    with pytest.raises(InputsError, match="Define `inputs` beside `model`"):
        load(str(tmp_path / "model.py"))


def cut(folder: Path) -> str:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    return str(folder)


def pickled(folder: Path) -> str:
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return str(folder)


def without_weights(folder: Path) -> str:
    (folder / "model.safetensors").unlink()
    return str(folder)


def without_a_config(folder: Path) -> str:
    (folder / "config.json").unlink()
    return str(folder)


def weights_alone(folder: Path) -> str:
    return f"{without_a_config(folder)}/model.safetensors"


def an_onnx_graph(folder: Path) -> str:
    (folder / "model.onnx").write_bytes(b"\0")
    return str(folder / "model.onnx")


def a_shard_that_is_missing(folder: Path) -> str:
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model-00002.safetensors"}})
    )
    return str(folder)


def half_a_config(folder: Path) -> str:
    (folder / "config.json").write_text('{"model_type": ')
    return str(folder)


REMOTE = {"model_type": "frob", "auto_map": {"AutoModel": "modeling_frob.FrobModel"}}


def of_another_width(folder: Path) -> str:
    return configured(folder, hidden_size=64)


def a_text(folder: Path) -> str:
    (folder / "model.txt").write_text("raise SystemExit('it was run')\n")
    return str(folder / "model.txt")


def no_python(folder: Path) -> str:
    (folder / "model.py").write_text("model = (\n")
    return str(folder / "model.py")


BAD = {
    "other weights": (
        of_another_width,
        r"bert\.\S+ is stored as 32, the configuration makes it 64, and \d+ more",
    ),
    "a text": (a_text, "no file that a model is read from"),
    "no Python": (no_python, "is not Python, line 1"),
    "truncated": (cut, "not a whole safetensors file"),
    "pickled": (pickled, "--allow-pickle"),
    "no weights": (without_weights, "no weights"),
    "no config": (without_a_config, "without a config.json"),
    "weights alone": (weights_alone, "no config.json beside it"),
    "onnx": (an_onnx_graph, "ONNX graph"),
    "shard": (a_shard_that_is_missing, "model-00002.safetensors' is missing"),
    "half a config": (half_a_config, "not valid JSON"),
    "remote code": (lambda folder: configured(folder, **REMOTE), r"modeling_frob\.py.*--trust-remote-code"),
    "unknown type": (lambda folder: configured(folder, model_type="frob"), "model_type = 'frob'"),
    "unknown architecture": (
        lambda folder: configured(folder, architectures=["BertFrob"]),
        "'BertFrob'.*--task",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_read_is_said(kind: str, copied: Path) -> None:
    make, said = BAD[kind]
    spec = make(copied)
    if kind not in ("remote code", "unknown type", "unknown architecture", "other weights"):
        # of these transformers has to be asked
        with pytest.raises(UsageError, match=said):
            check_source(find(spec), Reading())
    with pytest.raises(UsageError, match=said):
        load(spec)


def test_a_folder_is_looked_at_before_torch_loads(bert: Path) -> None:
    code = (
        "import sys; from effcompile.loader.source import Reading, find; from effcompile.loader.weights "
        f"import check_source\ncheck_source(find({str(bert)!r}), Reading()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_pickle_that_is_allowed(bert: Path, copied: Path) -> None:
    torch.save(
        transformers.BertForSequenceClassification.from_pretrained(bert).state_dict(),
        copied / "pytorch_model.bin",
    )
    (copied / "model.safetensors").unlink()
    assert load(str(copied), Reading(allow_pickle=True)).model is not None


@pytest.fixture
def cache(bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """HuggingFace's cache with one model in it, as its downloads lay it out."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--someone--classifier"
    shutil.copytree(bert, kept / "snapshots" / ("a" * 40))
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("a" * 40)
    return "someone/classifier"


def test_a_model_of_the_cache(cache: str) -> None:
    assert type(load(cache).model).__name__ == "BertForSequenceClassification"
    with pytest.raises(UsageError, match="hf download someone/other"):
        load("someone/other")
    with pytest.raises(EffcompileError, match="No such file"):
        load("classifier")
