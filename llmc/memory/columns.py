"""Rows of text one below the other, as --plan prints them."""


def in_columns(rows, numbers) -> list[str]:
    """Lines of the rows, equally many texts each: two spaces between columns, those whose places are in `numbers` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(width) if i in numbers else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
