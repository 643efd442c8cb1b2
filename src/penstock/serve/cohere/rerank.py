"""`POST /v1/rerank`, `/v2/rerank` and `/rerank`: rank documents by relevance to a question, in Jina's and Cohere's shapes."""

from __future__ import annotations

from typing import Annotated, Any, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from penstock.serve.asking import Asked
from penstock.serve.bodies import has_not_yet
from penstock.serve.errors import invalid
from penstock.serve.shapes import ApiVersion, Count, TokenUsage
from penstock.serve.texts import read
from penstock.serve.texts.call import TextResults
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import ranking
from penstock.serve.texts.pairs import Pairs


@has_not_yet('max_chunks_per_doc rank_fields=["text"]')
class RerankBody(read.TextsBody):
    query: Annotated[Any, Field(json_schema_extra={"type": "string", "minLength": 1})]
    documents: read.Documents
    top_n: Annotated[int, Field(ge=1)] | None = None
    """Return only this many best documents."""
    return_documents: bool | None = None
    """The default is true, except at `/v2/rerank`."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Cohere's field. Only values of at least the model's context are supported."""


RankedDocument = TypedDict("RankedDocument", {"text": str})
Ranked = TypedDict("Ranked", {"index": Count, "document": NotRequired[RankedDocument], "relevance_score": float})
SearchUnits = TypedDict("SearchUnits", {"search_units": Count})
RankingTokens = TypedDict("RankingTokens", {"input_tokens": Count})


class RankingMeta(TypedDict):
    api_version: ApiVersion
    billed_units: SearchUnits
    tokens: RankingTokens


class Ranking(TypedDict):
    id: str
    model: str
    results: list[Ranked]
    usage: TokenUsage
    meta: RankingMeta


def rerank(body: RerankBody, asked: Asked) -> Answer:
    """Score documents by how well they answer a question, and sort them."""
    return _rerank(body, asked, is_v2=False)


def rerank_v2(body: RerankBody, asked: Asked) -> Answer:
    """Rank documents like `/v1/rerank`, with the defaults of Cohere's second version: cut long texts, return no documents."""
    return _rerank(body, asked, is_v2=True)


def _rerank(body: RerankBody, asked: Asked, *, is_v2: bool) -> Answer:
    opened = read.open_body(asked, body)
    documents = read.read_documents(body.documents, "documents")
    pairs = Pairs([read.read_text(body.query, "query")], documents, lambda _: "query", lambda index: f"documents[{index}]")
    limit = opened.running.model.capacity.max_model_len
    if body.max_tokens_per_doc is not None and body.max_tokens_per_doc < limit:
        raise invalid(
            f"'max_tokens_per_doc' is {body.max_tokens_per_doc}, and less than the {limit} tokens that the model takes is "
            "not supported yet: use 'truncate_prompt_tokens' for question and document together.",
            "max_tokens_per_doc",
        )
    kept = body.truncate_prompt_tokens
    if kept is None and (is_v2 or body.max_tokens_per_doc is not None):
        kept = -1
    call = pairs.call(opened, read.read_truncation(kept, body.truncation_side, opened.running), is_search=True)
    has_documents = not is_v2 if body.return_documents is None else body.return_documents

    def write(results: TextResults) -> Ranking:
        found = pairs.scores(opened.encoder, results.results)
        results_told: list[Ranked] = []
        for index in ranking(found)[: body.top_n]:
            results_told.append({"index": index, "relevance_score": found[index]})
            if has_documents:
                results_told[-1]["document"] = {"text": documents[index]}
        return {
            "id": f"rerank-{opened.terms.request_id}",
            "model": opened.model_name,
            "results": results_told,
            "usage": results.usage,
            "meta": {
                "api_version": {"version": "2" if is_v2 else "1"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": results.num_tokens},
            },
        }

    return Answer(call, write)
