"""The Python API: ``PipelineTrainer``, in the style of the Hugging Face Trainer."""

from raypipe.launch.followers import Callback
from raypipe.trainer.arguments import init
from raypipe.trainer.pipeline_trainer import PipelineTrainer

__all__ = ["Callback", "PipelineTrainer", "init"]
