"""What scripts that draw share: reading a speed.log, and making a picture and writing it to a file."""

import io
import re
from pathlib import Path

from llmc.errors import UserError
from llmc.files import write_atomically

PICTURE_SUFFIXES = (".png", ".svg", ".pdf")
STEP = r"\d{1,18}"  # a number with more digits could not be drawn
SPEED_LINE = re.compile(rf"s:(?P<step>{STEP}) ms:(?P<ms>\d+\.\d+) tok/s:(?P<speed>\d+\.\d+)")
DPI = 150


def read_lines(path: Path) -> list[str]:
    """The lines of a log, without line ends. Raises UserError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}; check the path and its permissions") from error


def read_speed(path: Path) -> dict[int, tuple[float, float]]:
    """step -> (ms, tokens/s) of a speed.log; if a step appears twice, the later line counts. Raises UserError if it cannot be read."""
    found = filter(None, map(SPEED_LINE.fullmatch, read_lines(path)))
    return {int(line["step"]): (float(line["ms"]), float(line["speed"])) for line in found if float(line["ms"]) > 0}


def check_picture(path: Path, otherwise: str = "") -> None:
    """Raise UserError unless a picture can be drawn and written to `path`: better now than after the work for it."""
    if path.suffix.lower() not in PICTURE_SUFFIXES:
        raise UserError(f"-o {path}: expected a name that ends in {', '.join(PICTURE_SUFFIXES[:-1])} or {PICTURE_SUFFIXES[-1]}; rename it")
    if not path.parent.is_dir():
        raise UserError(f"-o {path}: the folder {path.parent} does not exist; create it first")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise UserError(f"drawing needs matplotlib, which is not installed; pip install matplotlib{otherwise}") from error


def shown(text: str) -> str:
    """The text escaped for a picture, where matplotlib would take what is between two dollars for a formula."""
    return text.replace("$", r"\$")


def new_figure(width: float, height: float):
    """An empty figure, width by height inches. Drawn by Agg: no window, no display, no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_picture(figure, path: Path) -> None:
    """Write the figure to `path` at DPI, whole or not at all, and say so. Raises UserError if it cannot."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix[1:].lower(), dpi=DPI)
    write_atomically(path, [content.getvalue()], doing="writing the picture")
    print(f"wrote {path}")
