"""The board: a local web page that lists runs, follows those that train, and compares them in the report's pictures."""

from fedretain.board.listing import Listing, RunEntry
from fedretain.board.server import Board, open_board

__all__ = ["Board", "Listing", "RunEntry", "open_board"]
