"""Convert GPT-2 weights between Hugging Face and llm.c's .bin, without losing a bit either way.

    python scripts/convert_hf.py to-bin gpt2 gpt2_124M_bf16.bin --precision bf16
    python scripts/convert_hf.py to-hf log124M/model_00018865.bin hf124M --tokenizer dev/data/fineweb10B/gpt2_tokenizer.bin

Needs safetensors, and transformers for names on the hub and for tokenizers: pip install "transformers" "safetensors".
"""

import argparse
import importlib
import json
import os
import sys
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, run_script  # first, as it says what is not installed

import numpy as np
import torch

from llmc.checkpoint.model_file import VERSIONS, parameter_bytes, read_model_header, write_model
from llmc.config import ModelConfig
from llmc.data.tokenizer import CHARACTER_OF_BYTE, Tokenizer, find_tokenizer
from llmc.files import HEADER_BYTES, Numbers, make_folder, replaced, write_atomically
from llmc.memory.arena import TORCH_DTYPE
from llmc.memory.tables import DTYPE_BYTES, parameter_shapes
from llmc.units import round_up

# ours -> theirs; {l} is the layer
HF_NAMES = {
    "wte": "wte.weight", "wpe": "wpe.weight", "ln1w": "h.{l}.ln_1.weight", "ln1b": "h.{l}.ln_1.bias",
    "qkvw": "h.{l}.attn.c_attn.weight", "qkvb": "h.{l}.attn.c_attn.bias",
    "attprojw": "h.{l}.attn.c_proj.weight", "attprojb": "h.{l}.attn.c_proj.bias",
    "ln2w": "h.{l}.ln_2.weight", "ln2b": "h.{l}.ln_2.bias", "fcw": "h.{l}.mlp.c_fc.weight", "fcb": "h.{l}.mlp.c_fc.bias",
    "fcprojw": "h.{l}.mlp.c_proj.weight", "fcprojb": "h.{l}.mlp.c_proj.bias", "lnfw": "ln_f.weight", "lnfb": "ln_f.bias",
}  # fmt: skip
TRANSPOSED = {"qkvw", "attprojw", "fcw", "fcprojw"}  # theirs are Conv1D weights, (in, out); ours are (out, in)
END_OF_TEXT = "<|endoftext|>"  # GPT-2's name for the token that separates documents
IGNORED = (".attn.bias", ".attn.masked_bias")  # causal masks in old files; not parameters

# config.json entries that change the mathematics -> the values that agree with this trainer's, the default first
REQUIRED = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # one formula under two names
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def need(module: str):
    """Import an optional package, or raise UserError saying how to get it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise UserError(f'the Python package {package} is missing; get it with: pip install "transformers" "safetensors"') from None


# --- Hugging Face -> .bin


def hf_to_bin(source: str, path, precision: str | None = None) -> None:
    """Write the model at `source` (a folder, or a name on the hub) as a model file.

    precision  "fp32" | "bf16", rounded to nearest even; None: bf16 if all tensors are bf16, otherwise fp32
    Raises UserError for a source that is not a GPT-2 this trainer can represent. Memory: one tensor at a time.
    """
    folder = Path(source) if os.path.isdir(source) else fetch_from_hub(source)
    config = config_from_hf(read_json(folder / "config.json"), f"{folder / 'config.json'}")
    tensors = open_tensors(folder)
    check_tensors(tensors, config, folder)
    if precision is None:
        precision = "bf16" if all(tensor.get_dtype() == "BF16" for tensor in tensors.values()) else "fp32"
    print(f"writing {path}: {precision}, {config}")
    write_model(path, config, precision, pieces_from_hf(tensors, config, TORCH_DTYPE[precision]))


def fetch_from_hub(name: str) -> Path:
    """The local folder in which transformers keeps a hub model; downloads it if needed. Raises UserError if that fails."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(f"{name} is not a folder; expected one with config.json and model.safetensors, or a hub name such as gpt2")
    hub = need("transformers.utils")
    need("safetensors")  # before the download, not after it
    try:
        config = hub.cached_file(name, "config.json")
        try:
            hub.cached_file(name, "model.safetensors")
        except OSError:
            for shard in named_files(Path(hub.cached_file(name, "model.safetensors.index.json"))):
                hub.cached_file(name, shard)
    except OSError as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{name} is no folder, and transformers cannot fetch its safetensors ({reason}); check the name and the network"
        ) from None
    return Path(config).parent


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises UserError if there is none."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; expected a Hugging Face model's folder, with config.json and model.safetensors") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a JSON {type(values).__name__}; expected an object, so download it again")
    return values


def named_files(index: Path) -> list[str]:
    """The files that a safetensors index names, sorted. Raises UserError if it names none."""
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not named or not all(isinstance(file, str) for file in named.values()):
        raise UserError(f'{index} has no "weight_map" of tensors to files; download it again')
    return sorted(set(named.values()))


def config_from_hf(values: dict, source: str) -> ModelConfig:
    """A model's sizes from its config.json. Raises UserError, naming `source`, if its mathematics differs from this trainer's."""
    for name, allowed in REQUIRED.items():
        if (found := values.get(name, allowed[0])) not in allowed:
            raise UserError(f"{source} has {name} {found!r}; this trainer's GPT-2 has {allowed[0]!r}, so the model cannot be converted")
    C = size_from_hf(values, source, "n_embd")
    if values.get("n_inner") not in (None, 4 * C):
        raise UserError(
            f"{source} has n_inner {values['n_inner']}; this trainer's GPT-2 has 4 * n_embd = {4 * C}, so it cannot be converted"
        )
    V = size_from_hf(values, source, "vocab_size")
    sizes = [size_from_hf(values, source, name) for name in ("n_positions", "n_layer", "n_head")]
    padded = size_from_hf(values, source, "padded_vocab_size", padded_to_128(V))
    return ModelConfig(sizes[0], V, sizes[1], sizes[2], C, padded).check(source)


def size_from_hf(values: dict, source: str, name: str, default: int | None = None) -> int:
    """An entry that must be a whole number. Raises UserError otherwise."""
    value = values.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(f"{source} has {name} {value!r}; expected a whole number, so download it again or convert another model")
    return value


def padded_to_128(V: int) -> int:
    """The vocabulary rounded up to a multiple of 128, as llm.c does, which suits matmuls."""
    return round_up(V, 128)


def open_tensors(folder: Path) -> dict:
    """Name without "transformer." -> a lazy slice of safetensors (get_shape, get_dtype, [:]). Raises UserError for damaged files."""
    safetensors = need("safetensors")
    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if not (folder / files[0]).exists() and index.exists():
        files = named_files(index)
    tensors = {}
    for file in files:
        if not (folder / file).is_file():
            raise UserError(f"{folder / file} does not exist; expected safetensors, so save the model with transformers' save_pretrained")
        try:
            opened = safetensors.safe_open(folder / file, framework="pt")
            tensors.update({name.removeprefix("transformer."): opened.get_slice(name) for name in opened.keys()})  # it is no dict
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{folder / file} is damaged ({error}); download or save it again") from None
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(IGNORED)}


def check_tensors(tensors: dict, config: ModelConfig, folder: Path) -> None:
    """Raise UserError unless these are exactly the tensors of such a model. An output head must equal wte, and is dropped."""
    head = tensors.pop("lm_head.weight", None)
    expected = set()
    for name, shape in hf_shapes(config):  # checked one by one: a damaged config.json may ask for any number of layers
        expected.add(name)
        if name not in tensors:
            raise UserError(f"{folder} lacks the tensor {name}, which its config.json asks for; save or download the model again")
        if (found := tuple(tensors[name].get_shape())) != shape:
            raise UserError(f"{folder} has {name} of shape {found}; its config.json asks for {shape}, so save or download the model again")
        if (dtype := tensors[name].get_dtype()) not in ("F32", "F16", "BF16"):
            raise UserError(f"{folder} has {name} as {dtype}; expected F32, F16 or BF16, so save the model again in one of these")
    if unknown := sorted(tensors.keys() - expected):
        raise UserError(f"{folder} has a tensor {unknown[0]}, which is not part of a GPT-2; the model cannot be converted")
    if head is not None and not torch.equal(head[:], tensors["wte.weight"][:]):
        raise UserError(
            f"{folder} has an lm_head.weight that differs from wte.weight; this trainer's GPT-2 ties them, so it cannot be converted"
        )


def hf_shapes(config: ModelConfig):
    """(name, shape) of every tensor of a Hugging Face GPT-2 of this size, without "transformer."."""
    return ((hf_name, shape[::-1] if name in TRANSPOSED else shape) for name, hf_name, shape in slices(config))


def slices(config: ModelConfig):
    """(our name, their name, our shape) of every stored tensor, one per layer, in the order of a .bin; wte without its padding."""
    for name, shape in parameter_shapes(config).items():
        if "{l}" in HF_NAMES[name]:
            yield from ((name, HF_NAMES[name].format(l=l), shape[1:]) for l in range(config.num_layers))
        else:
            yield name, HF_NAMES[name], (config.vocab_size, *shape[1:]) if name == "wte" else shape


def pieces_from_hf(tensors: dict, config: ModelConfig, dtype: torch.dtype):
    """The parameters of a .bin as uint8 arrays, one tensor at a time."""
    for name, hf_name, _ in slices(config):
        tensor = tensors[hf_name][:].to(dtype)
        tensor = (tensor.T if name in TRANSPOSED else tensor).contiguous()
        yield tensor.view(torch.uint8).numpy().reshape(-1)
        if name == "wte":
            yield np.zeros((config.padded_vocab_size - config.vocab_size) * config.channels * dtype.itemsize, np.uint8)


# --- .bin -> Hugging Face


def bin_to_hf(path, folder, tokenizer=None) -> None:
    """Write a model file as a folder that transformers loads, in the precision of the file, and its tokenizer, of which a line tells.

    tokenizer  llm.c's tokenizer file; None: see tokenizer_of
    Raises UserError for a damaged file, a `tokenizer` that cannot be written or a full disk. Memory: the whole model once.
    """
    need("safetensors")  # before there is a folder
    config, precision = read_model_header(path)
    files, told = tokenizer_of(path, config, tokenizer)
    tensors = tensors_from_bin(path, config, precision)
    folder = Path(folder)
    make_folder(folder)
    print(f"writing {folder}: {precision}, {config}")
    save_safetensors(folder / "model.safetensors", tensors)
    for name, values in {"config.json": config_to_hf(config, precision), **files}.items():
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        write_atomically(folder / name, [text.encode()], doing=f"writing {name}")
    stale = folder / "tokenizer.json"
    print(told if files or not stale.exists() else f"{told}; {stale} was there before, and is left")


def tokenizer_of(model, config: ModelConfig, path=None) -> tuple[dict[str, dict], str]:
    """The tokenizer's files, name -> JSON, and what to say of it. The table is at `path` or, without one, the first gpt2_tokenizer.bin of
    the model's size beside the model file or here; then there are no files if there is none, or if it cannot be converted."""
    table = find_tokenizer(path, (Path(model).parent, "."), config.vocab_size)
    if not table:
        return {}, "without a tokenizer: no gpt2_tokenizer.bin of this model's size is beside it or here; --tokenizer FILE names one"
    try:
        files = tokenizer_to_hf(table, config)
    except UserError as error:
        if path:
            raise
        return {}, f"without a tokenizer: {error}"
    return files, f"with the tokenizer of {table.path}: {len(files['tokenizer.json']['model']['merges'])} merges"


def tensors_from_bin(path, config: ModelConfig, precision: str) -> dict[str, torch.Tensor]:
    """Hugging Face names -> tensors in the file's precision. The head is wte, so it is not included. Prints a note if padding is lost."""
    tensors, at = {}, 0
    with Numbers(path, np.uint8, HEADER_BYTES) as parameters:
        for name, hf_name, shape in slices(config):
            n_bytes = prod(shape) * DTYPE_BYTES[precision]
            tensor = torch.from_numpy(parameters.read(at, n_bytes)).view(TORCH_DTYPE[precision]).reshape(shape)
            tensors["transformer." + hf_name] = tensor.T.contiguous() if name in TRANSPOSED else tensor
            at += n_bytes
            if name == "wte":
                n_bytes = (config.padded_vocab_size - config.vocab_size) * config.channels * DTYPE_BYTES[precision]
                if parameters.read(at, n_bytes).any():
                    rows = f"{config.vocab_size} to {config.padded_vocab_size - 1}"
                    print(f"note: the padding rows {rows} of wte in {path} are not zero; they are dropped")
                at += n_bytes
    assert at == parameter_bytes(config, precision)
    return tensors


def config_to_hf(config: ModelConfig, precision: str) -> dict:
    """The entries of config.json for transformers."""
    values = {
        "architectures": ["GPT2LMHeadModel"], **{name: allowed[0] for name, allowed in REQUIRED.items()},
        "vocab_size": config.vocab_size, "n_positions": config.max_seq_len, "n_ctx": config.max_seq_len,
        "n_embd": config.channels, "n_layer": config.num_layers, "n_head": config.num_heads, "n_inner": None,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,  # trained without dropout
        "initializer_range": 0.02, "tie_word_embeddings": True, "use_cache": True,
        "bos_token_id": config.end_of_text, "eos_token_id": config.end_of_text,
        "torch_dtype": str(TORCH_DTYPE[precision]).removeprefix("torch."),  # the name that transformers 4 and 5 both read
    }  # fmt: skip
    if config.padded_vocab_size != padded_to_128(config.vocab_size):
        values["padded_vocab_size"] = config.padded_vocab_size  # transformers keeps the entry, and to-bin needs it
    return values


def tokenizer_to_hf(table: Tokenizer, config: ModelConfig) -> dict[str, dict]:
    """tokenizer.json and tokenizer_config.json, with which transformers encodes and decodes as the table does, if its ids are in the order
    of its merges. An id without bytes of its own has a name too, which no text becomes: programs make embeddings as many as the tokens.

    Raises UserError for a table that lacks bytes or has another end-of-text than the model, or without the package tokenizers.
    """
    tokenizers, ids = need("tokenizers"), table.ids()
    table.need_all_bytes(ids)
    if table.end_of_text != config.end_of_text:
        raise UserError(
            f"the tokenizer {table.path} has token {table.end_of_text} for end-of-text, and models here have {config.end_of_text}, "
            f"so it cannot be converted; use one that has the same"
        )

    def named(token: bytes) -> str:
        return "".join(CHARACTER_OF_BYTE[byte] for byte in token)

    ids.pop(END_OF_TEXT.encode(), None)  # a token that only looks like it
    names = {i: named(token) for token, i in ids.items()} | {table.end_of_text: END_OF_TEXT}
    vocabulary = {names.get(i, f"<|unused {i}|>"): i for i in range(table.vocab_size)}  # no byte's character is a space
    merges = [(named(a), named(b)) for a, b in table.merges()]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    settings = {"tokenizer_class": "GPT2Tokenizer", "model_max_length": config.max_seq_len, "add_prefix_space": False, **special}
    return {"tokenizer.json": json.loads(made.to_str()), "tokenizer_config.json": settings}


def save_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors, whole or not at all. Raises UserError if the disk is full or denies access."""
    save_file, SafetensorError, doing = need("safetensors.torch").save_file, need("safetensors").SafetensorError, "writing the weights"
    try:
        with replaced(path, doing=doing) as temporary:
            temporary.unlink(missing_ok=True)  # an earlier run's, if one was killed
            temporary.touch()
            mode = temporary.stat().st_mode
            save_file(tensors, temporary, metadata={"format": "pt"})
            temporary.chmod(mode)  # as the umask has it: safetensors lets only the owner read
    except SafetensorError as error:
        raise UserError(f"{doing} failed at {path}: {error}; make room or fix the permissions, then run again") from None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert GPT-2 weights between Hugging Face and llm.c's .bin, losslessly.")
    commands = parser.add_subparsers(dest="command", required=True)
    to_bin = commands.add_parser("to-bin", help="a Hugging Face GPT-2 -> .bin")
    to_bin.add_argument("source", help="folder with config.json and model.safetensors, or a name on the hub such as gpt2")
    to_bin.add_argument("output", help="the .bin to write")
    to_bin.add_argument("--precision", choices=VERSIONS, help="of the .bin [bf16 for bf16 weights, else fp32]")
    to_hf = commands.add_parser("to-hf", help=".bin -> a folder that transformers loads")
    to_hf.add_argument("source", help="the .bin to read")
    to_hf.add_argument("output", help="the folder to write")
    to_hf.add_argument("--tokenizer", help="the data's gpt2_tokenizer.bin, to be written too [one beside the model or here]")
    args = parser.parse_args(argv)
    if args.command == "to-bin":
        hf_to_bin(args.source, args.output, args.precision)
    else:
        bin_to_hf(args.source, args.output, args.tokenizer)


if __name__ == "__main__":
    run_script(main)
