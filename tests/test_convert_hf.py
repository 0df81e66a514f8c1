"""Hugging Face <-> .bin: tensors equal to transformers' own, files equal to the byte, and every model that does not fit refused."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from case_a import CONFIG as CASE_A
from case_a import write_case_a

from llmc.checkpoint.model_file import parameter_bytes, read_model_header, write_model
from llmc.config import ModelConfig
from llmc.data.tokenizer import BYTE_OF_ID, UNKNOWN, GPT2Encoder, Tokenizer, find_tokenizer
from llmc.errors import UserError
from llmc.files import HEADER_BYTES
from llmc.memory.tables import DTYPE_BYTES, num_parameters, parameter_shapes
from scripts import convert_hf, write_debug_state
from scripts.convert_hf import bin_to_hf, hf_to_bin

REPO = Path(__file__).resolve().parent.parent
SIZES = {"vocab_size": 300, "n_positions": 64, "n_embd": 48, "n_layer": 3, "n_head": 4}
CONFIG = ModelConfig(max_seq_len=64, vocab_size=300, num_layers=3, num_heads=4, channels=48, padded_vocab_size=384)
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16}


def random_model(dtype=torch.float32, **changes):
    """A transformers GPT-2 whose every parameter is noise: its own init would hide swapped biases."""
    torch.manual_seed(5)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    return model.to(dtype)


def noise_bin(path, config, precision, padding=0) -> bytes:
    """A .bin of random bits, nans and denormals among them, its padding rows filled with a byte; returns the whole file."""
    data = np.random.default_rng(3).integers(0, 256, parameter_bytes(config, precision)).astype(np.uint8)
    row = config.channels * DTYPE_BYTES[precision]
    data[config.vocab_size * row : config.padded_vocab_size * row] = padding
    write_model(path, config, precision, [data])
    return path.read_bytes()


def by_name(path) -> dict[str, torch.Tensor]:
    """The 16 tensors of a .bin, cut by the table alone."""
    config, precision = read_model_header(path)
    flat, at, tensors = torch.from_numpy(np.fromfile(path, np.uint8, offset=HEADER_BYTES)).view(TORCH[precision]), 0, {}
    for name, shape in parameter_shapes(config).items():
        n = int(np.prod(shape))
        tensors[name] = flat[at : at + n].view(shape)
        at += n
    return tensors


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_tensor_lands_where_the_mathematics_wants_it(tmp_path, precision):
    """Each matrix applied as x @ w.T + b gives what transformers' Conv1D gives; vectors and embeddings are equal."""
    model = random_model(TORCH[precision])
    model.save_pretrained(tmp_path / "hf")
    hf_to_bin(str(tmp_path / "hf"), tmp_path / "m.bin")
    assert read_model_header(tmp_path / "m.bin") == (CONFIG, precision)
    ours, theirs = by_name(tmp_path / "m.bin"), model.transformer
    assert torch.equal(ours["wte"][:300], theirs.wte.weight) and not ours["wte"][300:].any()
    assert torch.equal(ours["wpe"], theirs.wpe.weight)
    assert torch.equal(ours["lnfw"], theirs.ln_f.weight) and torch.equal(ours["lnfb"], theirs.ln_f.bias)
    for l, block in enumerate(theirs.h):
        for name, norm in (("ln1", block.ln_1), ("ln2", block.ln_2)):
            assert torch.equal(ours[name + "w"][l], norm.weight) and torch.equal(ours[name + "b"][l], norm.bias)
        convs = {"qkv": block.attn.c_attn, "attproj": block.attn.c_proj, "fc": block.mlp.c_fc, "fcproj": block.mlp.c_proj}
        for name, conv in convs.items():
            assert torch.equal(ours[name + "b"][l], conv.bias)
            one_hot = torch.eye(conv.weight.shape[0], dtype=TORCH[precision])  # products with 0 and 1 are exact
            assert torch.equal(one_hot @ ours[name + "w"][l].T, one_hot @ conv.weight)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("padded", [384, 300, 512])
def test_bin_to_hf_and_back_is_byte_identical(tmp_path, precision, padded):
    """Also when the padding is not llm.c's multiple of 128."""
    config = ModelConfig(64, 300, 3, 4, 48, padded)
    original = noise_bin(tmp_path / "a.bin", config, precision)
    bin_to_hf(tmp_path / "a.bin", tmp_path / "hf")
    hf_to_bin(str(tmp_path / "hf"), tmp_path / "b.bin")
    assert (tmp_path / "b.bin").read_bytes() == original


def test_the_weights_may_be_read_by_whom_the_umask_lets(tmp_path):
    """Also where a run that was killed has left the weights half written."""
    noise_bin(tmp_path / "model.bin", CONFIG, "bf16")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.tmp").touch(0o600)
    bin_to_hf(tmp_path / "model.bin", tmp_path / "hf")
    modes = {path.name: path.stat().st_mode for path in (tmp_path / "model.bin", *(tmp_path / "hf").iterdir())}
    assert len(set(modes.values())) == 1, modes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_hf_to_bin_and_back_is_tensor_identical_in_transformers(tmp_path, precision):
    """transformers loads the folder: same dtype, same tensors, a tied head, and bit-identical logits."""
    model = random_model(TORCH[precision]).eval()
    model.save_pretrained(tmp_path / "a")
    hf_to_bin(str(tmp_path / "a"), tmp_path / "m.bin")
    bin_to_hf(tmp_path / "m.bin", tmp_path / "b")
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "b", dtype="auto", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert loaded.dtype == TORCH[precision] and loaded.lm_head.weight.data_ptr() == loaded.transformer.wte.weight.data_ptr()
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.state_dict().items())
    tokens = torch.arange(64)[None] * 3
    assert torch.equal(loaded.eval()(tokens).logits, model(tokens).logits)


def test_precision_can_be_chosen(tmp_path):
    """fp32 to bf16 rounds to nearest even; bf16 and fp16 to fp32 lose nothing."""
    model = random_model()
    model.save_pretrained(tmp_path / "fp32")
    hf_to_bin(str(tmp_path / "fp32"), tmp_path / "m.bin", "bf16")
    assert torch.equal(by_name(tmp_path / "m.bin")["wpe"], model.transformer.wpe.weight.bfloat16())
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype).save_pretrained(tmp_path / "half")
        hf_to_bin(str(tmp_path / "half"), tmp_path / "m.bin", "fp32")
        assert torch.equal(by_name(tmp_path / "m.bin")["wpe"], model.transformer.wpe.weight.float())


def test_one_fp32_tensor_among_bf16_ones_makes_the_file_fp32(tmp_path):
    """Or it would lose bits without being asked to."""
    model = random_model().bfloat16()
    model.save_pretrained(tmp_path / "hf")
    tensors = safetensors_torch.load_file(tmp_path / "hf" / "model.safetensors")
    tensors["transformer.ln_f.bias"] = torch.linspace(0, 1, 48)
    safetensors_torch.save_file(tensors, tmp_path / "hf" / "model.safetensors")
    hf_to_bin(str(tmp_path / "hf"), tmp_path / "m.bin")
    assert torch.equal(by_name(tmp_path / "m.bin")["lnfb"], torch.linspace(0, 1, 48))


def test_sharded_and_unprefixed_and_old_folders_give_the_same_file(tmp_path):
    """An index of several files; a GPT2Model without "transformer."; causal masks and a stored head beside the parameters; the index of
    another save beside a whole file."""
    model = random_model()
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    model.transformer.save_pretrained(tmp_path / "unprefixed")
    tensors = safetensors_torch.load_file(tmp_path / "unprefixed" / "model.safetensors")
    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((tmp_path / "plain" / "config.json").read_bytes())
    tensors |= {"h.0.attn.bias": torch.ones(1, 1, 64, 64, dtype=torch.uint8), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    safetensors_torch.save_file(tensors, old / "model.safetensors")
    index = "model.safetensors.index.json"
    (tmp_path / "unprefixed" / index).write_bytes((tmp_path / "sharded" / index).read_bytes())
    for name in ("plain", "sharded", "unprefixed", "old"):
        hf_to_bin(str(tmp_path / name), tmp_path / f"{name}.bin")
        assert (tmp_path / f"{name}.bin").read_bytes() == (tmp_path / "plain.bin").read_bytes()


def test_padding_rows_that_are_not_zero_are_dropped_aloud(tmp_path, capsys):
    """One line says so; a clean file says nothing."""
    noise_bin(tmp_path / "m.bin", CONFIG, "bf16", padding=1)
    bin_to_hf(tmp_path / "m.bin", tmp_path / "hf")
    assert "padding rows 300 to 383 of wte" in capsys.readouterr().out
    hf_to_bin(str(tmp_path / "hf"), tmp_path / "back.bin")
    bin_to_hf(tmp_path / "back.bin", tmp_path / "hf")
    assert "note:" not in capsys.readouterr().out
    row = 48 * 2
    a, b = (bytearray((tmp_path / name).read_bytes()) for name in ("m.bin", "back.bin"))
    a[HEADER_BYTES + 300 * row : HEADER_BYTES + 384 * row] = bytes(84 * row)
    assert a == b


MERGED = [b"he", b"th", b"the", b" t", b" the", "é".encode()]  # "the" is th and e, " the" is " t" and "he"


def table_of(merged) -> Tokenizer:
    """As many tokens as CONFIG has: the bytes, those merged from them, UNKNOWN, one that looks like end-of-text, and end-of-text."""
    table = [bytes([byte]) for byte in BYTE_OF_ID] + merged
    return Tokenizer(table + [UNKNOWN] * (298 - len(table)) + [b"<|endoftext|>", b"<eot>"], 299)


@pytest.fixture
def noise(tmp_path, monkeypatch):
    """A model file of noise in a folder of its own; the current folder is another."""
    for name in ("model", "here"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    noise_bin(tmp_path / "model" / "m.bin", CONFIG, "bf16")
    return tmp_path / "model" / "m.bin"


@pytest.mark.parametrize("merged", [MERGED, []], ids=["byte pairs", "bytes"])
def test_the_tokenizer_goes_along_and_encodes_and_decodes_as_it_does_here(noise, tmp_path, capsys, merged):
    table = table_of(merged)
    table.write("named.bin")
    convert_hf.main(["to-hf", str(noise), "hf", "--tokenizer", "named.bin"])
    assert f"with the tokenizer of named.bin: {len(merged)} merges\n" in capsys.readouterr().out
    text = " the then, h\u00e9\n\n\0 don't \U0001f600 \ufffd" + (REPO / "README.md").read_text(encoding="utf-8")
    expected = table.encode(text, like=[299 if not merged else 256])
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    plain = tokenizers.Tokenizer.from_file("hf/tokenizer.json")  # as other programs read it
    assert theirs.encode(text) == plain.encode(text).ids == expected
    assert theirs.decode(expected) == plain.decode(expected) == text
    for encode in (theirs.encode, lambda text: plain.encode(text).ids):
        assert encode("a<|endoftext|>b") == [*encode("a"), 299, *encode("b")]
    assert len(theirs) == plain.get_vocab_size() == 300 and theirs.model_max_length == 64
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (299, 299, 299)


@pytest.mark.parametrize("V", [50257, 50258, 50260])
def test_a_tokenizer_of_gpt2_s_tokens_is_gpt2_s(tmp_path, shared, monkeypatch, V):
    """For a model with more tokens too, as one that was fine-tuned with some for padding or for a chat."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(shared / "tiktoken-cache"))
    config = ModelConfig(max_seq_len=64, vocab_size=V, num_layers=1, num_heads=1, channels=16, padded_vocab_size=50304)
    noise_bin(tmp_path / "m.bin", config, "bf16")
    gpt2 = GPT2Encoder()
    for name in ("named.bin", "gpt2_tokenizer.bin"):
        gpt2.tokenizer().write(tmp_path / name)
    bin_to_hf(tmp_path / "m.bin", tmp_path / "hf", tmp_path / "named.bin")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for path in (*(REPO / "llmc").rglob("*.py"), REPO / "README.md"):
        text = path.read_text(encoding="utf-8").replace("<|endoftext|>", "")
        assert theirs.encode(text) == gpt2.encode(text), path
    assert len(theirs) == V and theirs.encode("\ufffd") == gpt2.encode("\ufffd")
    table = find_tokenizer(None, (tmp_path,), V)
    assert table.decode([31373, *range(50257, V), 995]) == b"hello world" and table.encode("\ufffd", like=[995]) == gpt2.encode("\ufffd")
    assert find_tokenizer(None, (tmp_path,), 50256) is None


def test_a_tokenizer_is_looked_for_beside_the_model_and_then_here(noise, capsys):
    table_of(MERGED).write("gpt2_tokenizer.bin")
    bin_to_hf(noise, "hf")
    assert "with the tokenizer of gpt2_tokenizer.bin: 6 merges\n" in capsys.readouterr().out
    table_of([]).write(noise.with_name("gpt2_tokenizer.bin"))
    bin_to_hf(noise, "hf")
    assert f"with the tokenizer of {noise.with_name('gpt2_tokenizer.bin')}: 0 merges\n" in capsys.readouterr().out


def test_without_a_tokenizer_only_the_model_is_written_and_that_is_said(noise, capsys):
    """An earlier one in the folder is left, and said to be."""
    Tokenizer.from_bytes_only().write("gpt2_tokenizer.bin")  # of another size, so not the model's
    bin_to_hf(noise, "hf")
    assert capsys.readouterr().out.endswith("--tokenizer FILE names one\n")
    assert sorted(path.name for path in Path("hf").iterdir()) == ["config.json", "model.safetensors"]
    table_of(MERGED).write("named.bin")
    bin_to_hf(noise, "hf", "named.bin")
    bin_to_hf(noise, "hf")
    assert capsys.readouterr().out.endswith("--tokenizer FILE names one; hf/tokenizer.json was there before, and is left\n")
    with pytest.raises(UserError, match="gpt2_tokenizer.bin has 50257 tokens and the model 300"):
        bin_to_hf(noise, "other", "gpt2_tokenizer.bin")
    assert not Path("other").exists()


LACKING = Tokenizer([UNKNOWN if token in (b"b", b"c") else token for token in table_of(MERGED).table], 299)
EARLY = Tokenizer([b"<eot>", *table_of(MERGED).table[:-1]], 0)


@pytest.mark.parametrize("table, lacks, reason", [
    (LACKING, None, "has no tokens for 2 of the 256 bytes"), (EARLY, None, "has token 0 for end-of-text, and models here have 299"),
    (table_of([]), "tokenizers", "the Python package tokenizers is missing"),
], ids=["lacks bytes", "another end-of-text", "no package"])  # fmt: skip
def test_a_tokenizer_that_cannot_be_converted_is_refused_if_named_and_else_left_out(noise, capsys, monkeypatch, table, lacks, reason):
    if lacks:
        monkeypatch.setitem(sys.modules, lacks, None)
    table.write("gpt2_tokenizer.bin")
    with pytest.raises(UserError, match=reason):
        bin_to_hf(noise, "hf", "gpt2_tokenizer.bin")
    assert not Path("hf").exists()
    bin_to_hf(noise, "hf")
    assert reason in capsys.readouterr().out
    assert sorted(path.name for path in Path("hf").iterdir()) == ["config.json", "model.safetensors"]


@pytest.fixture
def folder(tmp_path):
    """A good folder, to be spoiled."""
    random_model().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def refused(folder, *words):
    """hf_to_bin raises one sentence with these words and writes nothing."""
    with pytest.raises(UserError) as raised:
        hf_to_bin(str(folder), folder.parent / "m.bin")
    for word in words:
        assert word in str(raised.value)
    assert not (folder.parent / "m.bin").exists()


@pytest.mark.parametrize(
    "name, value",
    [
        ("n_inner", 100), ("activation_function", "relu"), ("layer_norm_epsilon", 1e-6), ("model_type", "llama"),
        ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True), ("add_cross_attention", True),
        ("n_embd", "48"), ("n_layer", None), ("n_layer", True), ("n_head", 5), ("vocab_size", 0), ("n_positions", 32),
        ("padded_vocab_size", 299),
    ],
)  # fmt: skip
def test_a_config_this_trainer_cannot_hold_is_refused_by_name(folder, name, value):
    """Another mathematics, a missing size, or sizes that are not those of the weights."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))
    words = {"n_head": ["48 channels", "5 heads"], "n_positions": ["wpe.weight", "(64, 48)", "(32, 48)"], "padded_vocab_size": ["to 299"]}
    refused(folder, str(folder), *words.get(name, [f"{name} "]))


def test_an_n_inner_of_four_n_embd_is_fine(folder):
    """It says what the default says."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "n_inner": 192, "activation_function": "gelu_pytorch_tanh"}))
    hf_to_bin(str(folder), folder.parent / "m.bin")


def test_weights_this_trainer_cannot_hold_are_refused_by_name(folder):
    """A tensor missing, unknown, of another dtype; a head of its own; a damaged file; no file."""
    path = folder / "model.safetensors"
    good = safetensors_torch.load_file(path)
    name = "transformer.h.1.attn.c_attn.weight"
    spoiled = [
        ({k: v for k, v in good.items() if k != name}, ["lacks the tensor h.1.attn.c_attn.weight"]),
        ({**good, "transformer.h.0.crossattention.c_attn.weight": torch.zeros(3)}, ["crossattention", "not part of a GPT-2"]),
        ({**good, name: good[name].double()}, ["h.1.attn.c_attn.weight as F64", "expected F32"]),
        ({**good, name: good[name].T.contiguous()}, ["shape (144, 48)", "asks for (48, 144)"]),
        ({**good, "lm_head.weight": good["transformer.wte.weight"] + 1}, ["lm_head.weight that differs", "ties"]),
    ]
    for tensors, words in spoiled:
        safetensors_torch.save_file(tensors, path)
        refused(folder, str(folder), *words)
    safetensors_torch.save_file(good, path)
    config, sizes = folder / "config.json", json.loads((folder / "config.json").read_text())
    config.write_text(json.dumps(sizes | {"n_layer": 10**9}))
    refused(folder, str(folder), "lacks the tensor h.3.ln_1.weight")
    config.write_text(json.dumps(sizes))
    path.write_bytes(path.read_bytes()[:5000])
    refused(folder, str(path), "damaged")
    path.unlink()
    refused(folder, str(path), "does not exist", "save_pretrained")
    for index in ("{}", '{"weight_map": [1]}', '{"weight_map": {"wte": 1}}'):
        (folder / "model.safetensors.index.json").write_text(index)
        refused(folder, "model.safetensors.index.json", 'has no "weight_map"')
    (folder / "config.json").write_text("{")
    refused(folder, "config.json", "cannot be read as JSON")
    (folder / "config.json").unlink()
    refused(folder, "config.json", "does not exist")


def test_a_hub_name_is_read_from_transformers_cache(tmp_path, monkeypatch, folder):
    """A snapshot as the hub client keeps it, offline; whole and sharded; and a name nobody has."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    cached_file = sys.modules["transformers.utils"].cached_file
    monkeypatch.setattr(sys.modules["transformers.utils"], "cached_file", lambda *args: cached_file(*args, cache_dir=tmp_path / "cache"))
    for name, size in (("whole", "1GB"), ("sharded", "100KB")):
        home = tmp_path / "cache" / f"models--someone--{name}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text("0" * 40)
        random_model().save_pretrained(home / "snapshots" / ("0" * 40), max_shard_size=size)
        hf_to_bin(f"someone/{name}", tmp_path / f"{name}.bin")
    hf_to_bin(str(folder), tmp_path / "local.bin")
    assert (tmp_path / "whole.bin").read_bytes() == (tmp_path / "sharded.bin").read_bytes() == (tmp_path / "local.bin").read_bytes()
    with pytest.raises(UserError, match="someone/else is no folder"):
        hf_to_bin("someone/else", tmp_path / "m.bin")
    for name in ("./nowhere", "/nowhere", "~/nowhere", "no/such/folder"):
        with pytest.raises(UserError, match=f"{name} is not a folder"):
            hf_to_bin(name, tmp_path / "m.bin")


def test_a_missing_package_is_one_sentence(folder, monkeypatch):
    """safetensors is an optional extra."""
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(folder, "safetensors is missing", "pip install")
    monkeypatch.setattr(sys.modules["transformers.utils"], "cached_file", lambda *_: pytest.fail("it downloads what it cannot read"))
    with pytest.raises(UserError, match="safetensors is missing"):
        hf_to_bin("someone/gpt2", folder.parent / "m.bin")
    noise_bin(folder.parent / "m.bin", CONFIG, "fp32")
    with pytest.raises(UserError, match="safetensors is missing"):
        bin_to_hf(folder.parent / "m.bin", folder.parent / "exported")
    assert not (folder.parent / "exported").exists()


def test_a_failed_write_leaves_the_earlier_weights(tmp_path, monkeypatch):
    """model.safetensors is whole or not there, like a checkpoint."""
    noise_bin(tmp_path / "m.bin", CONFIG, "fp32")
    bin_to_hf(tmp_path / "m.bin", tmp_path / "hf")
    before = (tmp_path / "hf" / "model.safetensors").read_bytes()

    def half(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors_torch, "save_file", half)
    with pytest.raises(UserError, match="model.safetensors: .*No space left on device"):
        bin_to_hf(tmp_path / "m.bin", tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").read_bytes() == before
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]


def test_the_script_reports_a_user_s_mistake_in_one_line(tmp_path):
    """ "error: ..." on stderr, exit code 2, no traceback."""
    command = [sys.executable, "scripts/convert_hf.py", "to-hf", tmp_path / "no.bin", tmp_path / "hf"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == f"error: {tmp_path / 'no.bin'} does not exist; expected a model file, so check the path\n"


def test_the_command_line_reaches_both_directions(tmp_path):
    """main() as the shell calls it."""
    original = noise_bin(tmp_path / "a.bin", CONFIG, "bf16")
    convert_hf.main(["to-hf", str(tmp_path / "a.bin"), str(tmp_path / "hf")])
    convert_hf.main(["to-bin", str(tmp_path / "hf"), str(tmp_path / "b.bin"), "--precision", "bf16"])
    assert (tmp_path / "b.bin").read_bytes() == original


def test_a_debug_state_agrees_with_transformers(tmp_path):
    """Logits, loss and all 16 gradients of scripts/write_debug_state.py against autograd on the converted model."""
    write_case_a(tmp_path)
    debug_path = tmp_path / "debug.bin"
    write_debug_state.main([str(tmp_path / "model.bin"), str(tmp_path / "val.bin"), str(debug_path), "-b", "3", "-t", "31"])
    inputs, targets = torch.from_numpy(np.fromfile(debug_path, "<i4", 2 * 3 * 31, offset=1024).astype(np.int64)).view(2, 3, 31)
    sizes = 3 * 31 * CASE_A.vocab_size, 1, num_parameters(CASE_A)
    floats = np.fromfile(debug_path, "<f4", offset=1024 + 4 * 2 * 3 * 31)
    their_logits, [their_loss], ours = np.split(floats, np.cumsum(sizes[:-1]))
    bin_to_hf(tmp_path / "model.bin", tmp_path / "hf")
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf").eval()
    assert len(ours) == sizes[-1] and torch.equal(inputs.flatten()[1:], targets.flatten()[:-1])
    with torch.enable_grad():  # the trainer turns it off for good
        logits = model(inputs).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
    assert np.allclose(their_logits, logits.detach().flatten(), rtol=0, atol=2e-6) and abs(their_loss - loss.item()) < 2e-6
    padding = CASE_A.padded_vocab_size - CASE_A.vocab_size
    for parameter in model.parameters():
        parameter.data = parameter.grad
    theirs = convert_hf.pieces_from_hf(slices_of(model), CASE_A, torch.float32)
    assert np.allclose(ours, np.concatenate(list(theirs)).view(np.float32), rtol=1e-4, atol=2e-6)
    wte = ours[: CASE_A.padded_vocab_size * CASE_A.channels]
    assert wte.any() and not wte[-padding * CASE_A.channels :].any()


def slices_of(model) -> dict[str, torch.Tensor]:
    """A model's parameters as open_tensors names them."""
    return {name.removeprefix("transformer."): parameter.detach() for name, parameter in model.named_parameters()}


def test_a_debug_state_s_bad_arguments_are_refused(tmp_path):
    """A bf16 model, a T the model has no positions for, a shard too short, no batch."""
    write_case_a(tmp_path)
    noise_bin(tmp_path / "bf16.bin", CONFIG, "bf16")
    for model, options, words in (
        ("bf16.bin", [], "bf16.bin is a bf16 model; expected fp32"),
        ("model.bin", ["-t", "65"], "-t 65 is longer than .*at most 64"),
        ("model.bin", ["-b", "100"], "val.bin has 2000 tokens; expected at least .* 6401"),
        ("model.bin", ["-b", "0"], "expected positive"),
        ("none.bin", [], "none.bin does not exist"),
    ):
        with pytest.raises(UserError, match=words):
            write_debug_state.main([str(tmp_path / model), str(tmp_path / "val.bin"), str(tmp_path / "debug.bin"), *options])
    assert not (tmp_path / "debug.bin").exists()
