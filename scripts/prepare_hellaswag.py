"""HellaSwag's 10,042 validation questions: which of four endings follows? Measured during training with -h 1.

    python scripts/prepare_hellaswag.py

The same file as llm.c's dev/data/hellaswag.py writes. --input takes a local hellaswag_val.jsonl, or the .parquet file of
Hugging Face's validation split, for which it needs pyarrow.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from llmc.errors import UserError, run_script  # first, as it says what is not installed

import numpy as np
from tqdm import tqdm

from llmc.data.evals import NUM_COMPLETIONS, Example, write_eval_file
from llmc.data.tokenizer import Encoder
from scripts import inputs, prepare

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
LABELS = [str(number) for number in range(NUM_COMPLETIONS)]  # a number in that file, a text in Hugging Face's


def read_questions(path: Path) -> Iterator[tuple[str, object, str]]:
    """(place, question, what to do about one that is wrong) of every line or row."""
    if path.suffix.lower() == ".parquet":
        rows = inputs.read_parquet(path, ["ctx", "endings", "label"], "give Hugging Face's validation split of HellaSwag")
        return ((place, record, inputs.LEAVE_OUT_ROWS) for place, record in rows)
    return ((place, record, inputs.MEND_THE_LINE) for place, record in inputs.read_jsonl(path))


def render(place: str, record, remedy: str, encoder: Encoder) -> Example:
    """The tokens of a question; `place` says which it is, for UserError, and `remedy` what to do."""
    context = inputs.text_field(record, "ctx", place, remedy)
    label, endings = record.get("label"), record.get("endings")
    if not context:
        raise UserError(f'{place}: field "ctx" is empty; {remedy}')
    if not isinstance(endings, list) or len(endings) != NUM_COMPLETIONS or not all(isinstance(e, str) for e in endings):
        raise UserError(f'{place}: expected "endings", a list of {NUM_COMPLETIONS} texts; {remedy}')
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
    path = inputs.one_input(args.input, name, ".jsonl", ".parquet") if args.input else inputs.download(URL, args.output / name)
    encoder, output = prepare.start(args), args.output / "hellaswag_val.bin"
    questions = tqdm(read_questions(path), desc="HellaSwag", unit=" examples", disable=None)
    count = write_eval_file(output, (render(*question, encoder) for question in questions))
    print(f"wrote {output}: {count:,} examples")


if __name__ == "__main__":
    run_script(main, prepare.BEGINS_ANEW)
