"""Rows of text in aligned columns, as --plan prints them."""


def in_columns(rows, numbers) -> list[str]:
    """A line for each row; all rows have equally many texts. Two spaces separate columns; those with an index in `numbers` align right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.rjust(width) if i in numbers else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]
