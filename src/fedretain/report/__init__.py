"""Pictures and pages from run directories: tables, curves, forgetting heatmaps, partition bars."""

from fedretain.report.comparison import COLUMNS, Column, Spread, comparison_rows
from fedretain.report.figures import partition_figure
from fedretain.report.pictures import write_pictures
from fedretain.report.reading import ForgettingRound, RunData, read_forgetting, read_run
from fedretain.report.reports import Report, make_report, write_partition_page, write_report
from fedretain.report.summaries import SUMMARIES, Reached, TrainingPair, summary_rows, training_pairs

__all__ = [
    "COLUMNS",
    "SUMMARIES",
    "Column",
    "ForgettingRound",
    "Reached",
    "Report",
    "RunData",
    "Spread",
    "TrainingPair",
    "comparison_rows",
    "make_report",
    "partition_figure",
    "read_forgetting",
    "read_run",
    "summary_rows",
    "training_pairs",
    "write_partition_page",
    "write_pictures",
    "write_report",
]
