"""Training data: found and packed once by the driver, read by each actor row by row."""

from raypipe.data.corpus import Corpus
from raypipe.data.dataset import Dataset, open_data
from raypipe.data.prepare import prepare

__all__ = ["Corpus", "Dataset", "open_data", "prepare"]
