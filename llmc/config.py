"""Model sizes: what a .bin header holds, and the descriptors that stand for it (d12, gpt2:d48, gpt3:c768)."""

from dataclasses import dataclass

from llmc.errors import UserError

GPT2_END_OF_TEXT = 50256
GPT2_VOCAB_SIZE, GPT2_PADDED_VOCAB_SIZE = 50257, 50304  # padded to a multiple of 128 for the matmul

# depth -> (channels, heads); llm.c's table, max_seq_len 1024
GPT2_DEPTHS = {
    6: (384, 6), 12: (768, 12), 24: (1024, 16), 36: (1280, 20),
    48: (1600, 25), 60: (1920, 30), 72: (2880, 30), 84: (3456, 36),
}  # fmt: skip

# channels -> (depth, head size); llm.c's table, max_seq_len 2048
GPT3_CHANNELS = {
    384: (6, 64), 768: (12, 64), 1024: (24, 64), 1536: (24, 96), 2048: (24, 128),
    2560: (32, 80), 4096: (32, 128), 5140: (40, 128), 12288: (96, 128),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of one model, in the order of a model file's header entries 2 to 7."""

    max_seq_len: int
    vocab_size: int
    num_layers: int
    num_heads: int
    channels: int
    padded_vocab_size: int

    def __str__(self) -> str:
        return f"L={self.num_layers} NH={self.num_heads} C={self.channels} V={self.vocab_size}"

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.channels // self.num_heads

    @property
    def end_of_text(self) -> int:
        """GPT-2's <|endoftext|>, or the last token of a vocabulary that ends before it."""
        return min(GPT2_END_OF_TEXT, self.vocab_size - 1)

    def check(self, source: str) -> "ModelConfig":
        """Raise UserError, naming `source`, unless these sizes make a model."""
        for name in self.__dataclass_fields__:
            if getattr(self, name) <= 0:
                raise UserError(
                    f"{source} says {name} = {getattr(self, name)}; expected a positive number, so the header is damaged or not a GPT-2's"
                )
        if self.channels % self.num_heads:
            raise UserError(f"{source} has {self.channels} channels, which {self.num_heads} heads do not divide; choose another model")
        if self.padded_vocab_size < self.vocab_size:
            raise UserError(
                f"{source} pads a vocabulary of {self.vocab_size} to {self.padded_vocab_size}, which is smaller; the header is damaged"
            )
        return self


def config_from_descriptor(descriptor: str) -> ModelConfig:
    """The sizes `dN`, `gpt2:dN` or `gpt3:cN` stand for. Raises UserError for any other, and for one that llm.c refuses."""
    gpt3 = (C for C, (_, head_size) in GPT3_CHANNELS.items() if C % head_size == 0)
    known = f"d{{{','.join(map(str, GPT2_DEPTHS))}}}, gpt2:d... or gpt3:c{{{','.join(map(str, gpt3))}}}"
    family, _, size = descriptor.rpartition(":")
    kind, digits = size[:1], size[1:]
    if digits.isdecimal() and family in ("", "gpt2") and kind == "d" and int(digits) in GPT2_DEPTHS:
        L = int(digits)
        (C, NH), max_seq_len = GPT2_DEPTHS[L], 1024
    elif digits.isdecimal() and family == "gpt3" and kind == "c" and int(digits) in GPT3_CHANNELS:
        C = int(digits)
        (L, head_size), max_seq_len = GPT3_CHANNELS[C], 2048
        if C % head_size:
            raise UserError(
                f"-e {descriptor}: {C} channels are not a multiple of the head size {head_size}; "
                "llm.c refuses this model too, choose gpt3:c4096 or gpt3:c12288"
            )
        NH = C // head_size
    else:
        raise UserError(
            f"-e {descriptor}: neither a .bin file nor a known model descriptor; expected {known}, or the path of a model .bin, "
            "which scripts/convert_hf.py to-bin makes of a Hugging Face model"
        )
    return ModelConfig(max_seq_len, GPT2_VOCAB_SIZE, L, NH, C, GPT2_PADDED_VOCAB_SIZE)
