"""Pictures and pages from run directories: tables, curves, forgetting heatmaps, partition bars."""

from fedretain.report.comparison import COLUMNS, Column, Spread, comparison_rows
from fedretain.report.figures import partition_figure
from fedretain.report.pictures import write_pictures
from fedretain.report.reading import ForgettingRound, RunData, read_forgetting, read_run
from fedretain.report.reports import write_partition_page, write_report

__all__ = [
    "COLUMNS",
    "Column",
    "ForgettingRound",
    "RunData",
    "Spread",
    "comparison_rows",
    "partition_figure",
    "read_forgetting",
    "read_run",
    "write_partition_page",
    "write_pictures",
    "write_report",
]
