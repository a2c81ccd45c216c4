"""Loaders: what a configuration of a loader is called in a figure."""

from __future__ import annotations

import polars as pl


def named(frame: pl.DataFrame) -> pl.Expr:
    """The configuration in words, on up to three lines: program, loader, workers and page-locked memory."""

    def column(name: str) -> pl.Expr:
        return pl.col(name) if name in frame.columns else pl.lit(None, pl.String).alias(name)

    workers = pl.when(column("workers").is_not_null()).then(
        pl.format(
            "\n{} workers{}",
            column("workers"),
            pl.when(column("pin") == "on").then(pl.lit(",\npinned")).otherwise(pl.lit("")),
        )
    )
    program = pl.when(pl.col("program") == "trainer").then(pl.lit("ours")).otherwise(pl.lit("PyTorch"))
    return pl.concat_str([program, pl.lit(":\n"), pl.col("loader"), workers.fill_null("")])
