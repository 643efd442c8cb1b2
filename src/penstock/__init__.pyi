from penstock.inprocess import ChatOptions as ChatOptions
from penstock.inprocess import ClassificationOutput as ClassificationOutput
from penstock.inprocess import ClassificationRequestOutput as ClassificationRequestOutput
from penstock.inprocess import CompletionOutput as CompletionOutput
from penstock.inprocess import EmbeddingOutput as EmbeddingOutput
from penstock.inprocess import EmbeddingRequestOutput as EmbeddingRequestOutput
from penstock.inprocess import Logprob as Logprob
from penstock.inprocess import Message as Message
from penstock.inprocess import Prompt as Prompt
from penstock.inprocess import RequestMetrics as RequestMetrics
from penstock.inprocess import RequestOutput as RequestOutput
from penstock.inprocess import SamplingParams as SamplingParams
from penstock.inprocess import ScoringOutput as ScoringOutput
from penstock.inprocess import ScoringRequestOutput as ScoringRequestOutput
from penstock.inprocess import StructuredOutputsParams as StructuredOutputsParams
from penstock.llm import LLM as LLM
from penstock.llm import AsyncLLM as AsyncLLM
from penstock.types.errors import PenstockError as PenstockError

__version__: str
