"""A report ready for rendering: its sections, and the content of report.json, which contains their numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.types import JsonObject
from paceline.report.content import sections
from paceline.report.model import Cell, Report, Run, as_json
from paceline.report.parts import Section, fill
from paceline.report.plots import plot_names
from paceline.report.summary import summarise

# The fields of a run that report.json contains.
RUN_KEYS = (
    "recipe",
    "strategy",
    "devices",
    "batch",
    "seed",
    "precision",
    "images",
    "seconds",
    "quality",
    "selection_metric",
    "checkpoint",
    "speed",
    "seconds_per_epoch",
    "gpu",
    "losses",
    "selection_curve",
    "protocols",
    "provenance",
    "broken_lines",
    "segment_changes",
    "side_by_side",
    "num_threads",
    "straggler",
    "profile",
    "load_average",
    "speed_run",
)


@dataclass(frozen=True)
class Document:
    """The content of report.html, report.md and report.json."""

    report: Report
    content: JsonObject  # written to report.json
    sections: list[Section]
    summary: list[str]


def document_of(report: Report) -> Document:
    """Return the report with its sections and summary."""
    numbers = _object(replace(report, cells=[], runs={})) | {
        "cells": [_content_of_cell(cell) for cell in report.cells],
        "runs": {folder: _content_of_run(run) for folder, run in report.runs.items()},
    }
    phrases, plots = summarise(report), plot_names(report)
    summary = [fill(phrase, numbers) for phrase in phrases]
    content = numbers | {"plots": as_json(plots), "summary": as_json(summary)}
    return Document(report, content, sections(report, phrases, plots), summary)


def _content_of_cell(cell: Cell) -> JsonObject:
    content = _object(replace(cell, run=None))
    del content["run"]
    return content


def _content_of_run(run: Run) -> JsonObject:
    content = _object(run)
    return {name: {} if content[name] is None else content[name] for name in RUN_KEYS}


def _object(value: Report | Cell | Run) -> JsonObject:
    content = as_json(value)
    assert isinstance(content, dict)
    return content
