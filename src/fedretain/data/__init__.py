"""Examples and who holds them: datasets, partitions, federations."""

from fedretain.data.arrays import from_arrays
from fedretain.data.dataset import Dataset, Examples
from fedretain.data.sources import DATASETS, load_dataset

__all__ = ["DATASETS", "Dataset", "Examples", "from_arrays", "load_dataset"]
