"""HellaSwag's 10,042 validation questions: which of four endings follows? Measured during training with -h 1.

    python scripts/prepare_hellaswag.py

The same file as llm.c's dev/data/hellaswag.py writes. --input takes a local hellaswag_val.jsonl.
"""

import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.data.evals import NUM_COMPLETIONS, Example, write_eval_file
from llmc.data.tokenizer import Encoder
from llmc.errors import UserError, run_script
from scripts import prepare

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
LABELS = [str(number) for number in range(NUM_COMPLETIONS)]  # a number here, a text in Hugging Face's copy


def render(record, place: str, encoder: Encoder) -> Example:
    """The tokens of one line of the .jsonl; `place` says which, for UserError."""
    context = prepare.text_field(record, "ctx", place, prepare.MEND_THE_LINE)
    label, endings = record.get("label"), record.get("endings")
    if not context:
        raise UserError(f'{place}: field "ctx" is empty; mend or remove this line')
    if not isinstance(endings, list) or len(endings) != NUM_COMPLETIONS or not all(isinstance(e, str) for e in endings):
        raise UserError(f'{place}: expected "endings", a list of {NUM_COMPLETIONS} texts; mend or remove this line')
    if str(label) not in LABELS:
        raise UserError(
            f'{place}: "label" is {label!r}, expected a number from 0 to {NUM_COMPLETIONS - 1}; '
            "the test split has none, use the validation split"
        )

    def tokens(text: str) -> np.ndarray:
        return np.asarray(encoder.encode(text), dtype=np.uint16)

    # GPT-2's words carry the space before them, so the ending must bring its own
    return Example(int(label), tokens(context), tuple(tokens(" " + ending) for ending in endings))


def main(argv: list[str] | None = None) -> None:
    args = prepare.argument_parser(__doc__, "dev/data/hellaswag", corpus=False).parse_args(argv)
    name = "hellaswag_val.jsonl"
    path = prepare.one_input(args.input, ".jsonl", name) if args.input else prepare.download(URL, args.output / name)
    encoder, output = prepare.start(args), args.output / "hellaswag_val.bin"
    lines = tqdm(prepare.read_jsonl(path), desc="HellaSwag", unit=" examples", disable=None)
    count = write_eval_file(output, (render(record, place, encoder) for place, record in lines))
    print(f"wrote {output}: {count:,} examples")


if __name__ == "__main__":
    run_script(main, prepare.BEGINS_ANEW)
