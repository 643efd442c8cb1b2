"""The answers of each route, as JSON schemas. `openapi` puts them into its document.

A schema says which fields are there, and which may be; clients should bear further ones. `make test-openapi` checks a real
server's answers, and takes a field that is not here for a fault.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

Schema = Mapping[str, Any]
"""A JSON schema, of the dialect that OpenAPI 3.1 has."""
REF = "#/components/schemas/"
JSON, EVENTS, LINES, PLAIN = "application/json", "text/event-stream", "application/x-ndjson", "text/plain"

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_INTEGER: Schema = {"type": "integer"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FLAG: Schema = {"type": "boolean"}
_NULL: Schema = {"type": "null"}
_ANYTHING: Schema = {}
_ANY_OBJECT: Schema = {"type": "object"}


def _object(**fields: Schema) -> Schema:
    """An object with these fields. One whose name ends with `_if_any` may be absent."""
    names = {name: name.removesuffix("_if_any") for name in fields}
    return {
        "type": "object",
        "properties": {names[name]: schema for name, schema in fields.items()},
        "required": [name for name in fields if names[name] == name],
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _map(values: Schema) -> Schema:
    return {"type": "object", "additionalProperties": values}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


def _or_null(schema: Schema) -> Schema:
    return _any(schema, _NULL)


def _word(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _ref(name: str) -> Schema:
    return {"$ref": REF + name}


def _event(*names: str) -> Schema:
    """One event of a stream, as OpenAPI 3.1 has no other place for it. Its data is one of these, or an error."""
    told = _any(*map(_ref, names), _ref("Error"))
    return _object(event_if_any=_TEXT, data={"type": "string", "contentMediaType": JSON, "contentSchema": told})


_VECTOR = _list(_NUMBER)
_EMBEDDING = _any(_VECTOR, {"type": "string", "description": "float32 in little-endian order, as base64"})
_NAMES_OF_PARTS = _map(_NUMBER)
_TOKENS_IF_ASKED = {"token_ids_if_any": _list(_COUNT), "prompt_token_ids_if_any": _list(_COUNT)}
_TIMES_IF_ASKED = {"timings_if_any": _NAMES_OF_PARTS, "prompt_progress_if_any": _NAMES_OF_PARTS}
_PROMPT_LOGPROBS = _list(_or_null(_map(_object(logprob=_NUMBER, rank={"type": "integer", "minimum": 1}, decoded_token=_TEXT))))
_ANSWER_HEAD = {"id": _TEXT, "created": _INTEGER, "model": _TEXT, "system_fingerprint": _TEXT}
_ENDS = {"finish_reason": _word("stop", "length"), "stop_reason": _any(_TEXT, _INTEGER, _NULL)}
_CHAT_ENDS = _ENDS | {"finish_reason": _word("stop", "length", "tool_calls")}
_TOKEN = {"token": _TEXT, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_COMPLETION_LOGPROBS = _or_null(
    _object(
        text_offset=_list(_COUNT),
        token_logprobs=_list(_or_null(_NUMBER)),
        tokens=_list(_TEXT),
        top_logprobs=_list(_or_null(_map(_NUMBER))),
    )
)
_CHAT_LOGPROBS = _or_null(_object(content=_list(_ref("ChatToken")), refusal=_NULL))
_LIST_OF_TEXTS = {"id": _TEXT, "object": _word("list"), "created": _INTEGER, "model": _TEXT, "usage": _ref("TextsUsage")}
_ITEM_HEAD = {"id": _TEXT, "status": _word("in_progress", "completed", "incomplete")}
_MESSAGE_PARTS = _list(
    _object(type=_TEXT, text=_TEXT, annotations_if_any=_list(_ANYTHING), logprobs_if_any=_list(_ref("ChatToken")))
)
_SIZES_IF_TOO_LONG = {"n_prompt_tokens_if_any": _COUNT, "n_ctx_if_any": _COUNT}
_LLAMA_TOKEN = {"id": _COUNT, "token": _TEXT, "bytes": _list(_COUNT), "logprob": _NUMBER}
_OLLAMA_HEAD = {"model": _TEXT, "created_at": _TEXT, "done": _FLAG}
_OLLAMA_END = {
    "done_reason_if_any": _TEXT,
    "total_duration_if_any": _COUNT,
    "load_duration_if_any": _COUNT,
    "prompt_eval_count_if_any": _COUNT,
    "prompt_eval_duration_if_any": _COUNT,
    "eval_count_if_any": _COUNT,
    "eval_duration_if_any": _COUNT,
    "logprobs_if_any": _list(_ref("ChatToken")),
}
_TGI_END = {"finish_reason": _word("length", "eos_token", "stop_sequence"), "generated_tokens": _COUNT, "seed": _INTEGER}
_OLLAMA_MODEL = {"name": _TEXT, "model": _TEXT, "digest": _TEXT, "details": _ref("OllamaDetails")}

SCHEMAS: Mapping[str, Schema] = MappingProxyType(
    {
        # OpenAI's
        "Usage": _object(
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            total_tokens=_COUNT,
            prompt_tokens_details=_object(cached_tokens=_COUNT),
        ),
        "Completion": _object(
            object=_word("text_completion"),
            choices=_list(_ref("CompletionChoice")),
            usage=_ref("Usage"),
            **_TIMES_IF_ASKED,
            **_ANSWER_HEAD,
        ),
        "CompletionChoice": _object(
            index=_COUNT,
            text=_TEXT,
            logprobs=_COMPLETION_LOGPROBS,
            prompt_logprobs_if_any=_PROMPT_LOGPROBS,
            **_TOKENS_IF_ASKED,
            **_ENDS,
        ),
        "ChatCompletion": _object(
            object=_word("chat.completion"),
            choices=_list(_ref("ChatChoice")),
            usage=_ref("Usage"),
            prompt_token_ids_if_any=_list(_COUNT),
            prompt_logprobs_if_any=_PROMPT_LOGPROBS,
            **_TIMES_IF_ASKED,
            **_ANSWER_HEAD,
        ),
        "ChatChoice": _object(
            index=_COUNT,
            message=_object(
                role=_word("assistant"),
                content=_or_null(_TEXT),
                refusal=_NULL,
                reasoning_content_if_any=_TEXT,
                tool_calls_if_any=_list(
                    _object(id=_TEXT, type=_word("function"), function=_object(name=_TEXT, arguments=_TEXT))
                ),
            ),
            logprobs=_CHAT_LOGPROBS,
            token_ids_if_any=_list(_COUNT),
            **_CHAT_ENDS,
        ),
        "CompletionChunk": _object(
            object=_word("text_completion"),
            choices=_list(
                _object(
                    index=_COUNT,
                    text=_TEXT,
                    logprobs=_COMPLETION_LOGPROBS,
                    finish_reason=_or_null(_ENDS["finish_reason"]),
                    stop_reason_if_any=_ENDS["stop_reason"],
                    **_TOKENS_IF_ASKED,
                )
            ),
            usage_if_any=_or_null(_ref("Usage")),
            **_TIMES_IF_ASKED,
            **_ANSWER_HEAD,
        ),
        "ChatChunk": _object(
            object=_word("chat.completion.chunk"),
            choices=_list(
                _object(
                    index=_COUNT,
                    delta=_object(
                        role_if_any=_word("assistant"),
                        content_if_any=_or_null(_TEXT),
                        reasoning_content_if_any=_TEXT,
                        tool_calls_if_any=_list(
                            _object(
                                index=_COUNT,
                                id_if_any=_TEXT,
                                type_if_any=_word("function"),
                                function=_object(name_if_any=_TEXT, arguments=_TEXT),
                            )
                        ),
                    ),
                    logprobs=_CHAT_LOGPROBS,
                    finish_reason=_or_null(_CHAT_ENDS["finish_reason"]),
                    stop_reason_if_any=_ENDS["stop_reason"],
                    token_ids_if_any=_list(_COUNT),
                )
            ),
            usage_if_any=_or_null(_ref("Usage")),
            prompt_token_ids_if_any=_list(_COUNT),
            **_TIMES_IF_ASKED,
            **_ANSWER_HEAD,
        ),
        "ChatToken": _object(top_logprobs=_list(_object(**_TOKEN)), **_TOKEN),
        "ModelCard": _object(
            id=_TEXT,
            object=_word("model"),
            created=_INTEGER,
            owned_by=_TEXT,
            root=_TEXT,
            parent=_or_null(_TEXT),
            max_model_len=_or_null(_COUNT),
            task=_or_null(_word("generate", "embed", "rerank", "classify")),
            status=_object(value=_TEXT, cause_if_any=_TEXT),
        ),
        "ModelList": _object(object=_word("list"), data=_list(_ref("ModelCard"))),
        "Embeddings": _object(
            object=_word("list"),
            data=_list(_object(object=_word("embedding"), index=_COUNT, embedding=_EMBEDDING)),
            model=_TEXT,
            usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
        ),
        "Response": _object(
            id=_TEXT,
            object=_word("response"),
            created_at=_INTEGER,
            status=_word("queued", "in_progress", "completed", "incomplete", "failed", "cancelled"),
            background=_FLAG,
            completed_at=_or_null(_INTEGER),
            error=_or_null(_object(code=_TEXT, message=_TEXT)),
            incomplete_details=_or_null(_object(reason=_TEXT)),
            instructions=_or_null(_TEXT),
            max_output_tokens=_or_null(_COUNT),
            max_tool_calls=_or_null(_COUNT),
            metadata=_map(_TEXT),
            model=_TEXT,
            output=_list(_ref("ResponseItem")),
            parallel_tool_calls=_FLAG,
            previous_response_id=_or_null(_TEXT),
            prompt_cache_key=_or_null(_TEXT),
            reasoning=_object(effort=_or_null(_TEXT), summary=_NULL),
            safety_identifier=_or_null(_TEXT),
            service_tier=_TEXT,
            store=_FLAG,
            system_fingerprint=_TEXT,
            temperature=_NUMBER,
            text=_object(format=_ANY_OBJECT, verbosity=_TEXT),
            tool_choice=_any(_TEXT, _ANY_OBJECT),
            tools=_list(_ANY_OBJECT),
            top_logprobs=_COUNT,
            top_p=_NUMBER,
            truncation=_TEXT,
            usage=_or_null(
                _object(
                    input_tokens=_COUNT,
                    input_tokens_details=_object(cached_tokens=_COUNT),
                    output_tokens=_COUNT,
                    output_tokens_details=_object(reasoning_tokens=_COUNT),
                    total_tokens=_COUNT,
                )
            ),
            user=_or_null(_TEXT),
        ),
        "ResponseItem": _any(
            _object(type=_word("message"), role=_TEXT, content=_MESSAGE_PARTS, **_ITEM_HEAD),
            _object(
                type=_word("reasoning"),
                summary=_list(_object(type=_TEXT, text=_TEXT)),
                content=_list(_object(type=_TEXT, text=_TEXT)),
                **_ITEM_HEAD,
            ),
            _object(type=_word("function_call"), call_id=_TEXT, name=_TEXT, arguments=_TEXT, **_ITEM_HEAD),
            _object(type=_word("function_call_output"), call_id=_TEXT, output=_any(_TEXT, _MESSAGE_PARTS), **_ITEM_HEAD),
        ),
        "ResponseItems": _object(
            object=_word("list"),
            data=_list(_ref("ResponseItem")),
            first_id=_or_null(_TEXT),
            last_id=_or_null(_TEXT),
            has_more=_FLAG,
        ),
        "ResponseEvent": {"type": "object", "required": ["type", "sequence_number"]},
        "ResponseForgotten": _object(id=_TEXT, object=_word("response"), deleted=_FLAG),
        # Anthropic's
        "AnthropicMessage": _object(
            id=_TEXT,
            type=_word("message"),
            role=_word("assistant"),
            model=_TEXT,
            content=_list(
                _any(
                    _object(type=_word("text"), text=_TEXT),
                    _object(type=_word("thinking"), thinking=_TEXT, signature=_TEXT),
                    _object(type=_word("tool_use"), id=_TEXT, name=_TEXT, input=_ANY_OBJECT),
                )
            ),
            stop_reason=_word("end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"),
            stop_sequence=_or_null(_TEXT),
            usage=_object(
                input_tokens=_COUNT, cache_creation_input_tokens=_COUNT, cache_read_input_tokens=_COUNT, output_tokens=_COUNT
            ),
        ),
        "AnthropicEvent": {"type": "object", "required": ["type"]},
        "AnthropicCount": _object(input_tokens=_COUNT),
        "AnthropicModel": _object(
            type=_word("model"),
            id=_TEXT,
            display_name=_TEXT,
            created_at=_TEXT,
            lifecycle=_TEXT,
            max_input_tokens=_or_null(_COUNT),
            max_tokens=_or_null(_COUNT),
        ),
        "AnthropicModelList": _object(
            data=_list(_ref("AnthropicModel")), has_more=_FLAG, first_id=_or_null(_TEXT), last_id=_or_null(_TEXT)
        ),
        "AnthropicError": _object(type=_word("error"), error=_object(type=_TEXT, message=_TEXT, details_if_any=_ANY_OBJECT)),
        # Ollama's
        "OllamaChat": _object(
            message=_object(
                role=_word("assistant"),
                content=_TEXT,
                thinking_if_any=_TEXT,
                tool_calls_if_any=_list(_object(id=_TEXT, function=_object(index=_COUNT, name=_TEXT, arguments=_ANY_OBJECT))),
            ),
            **_OLLAMA_HEAD,
            **_OLLAMA_END,
        ),
        "OllamaGenerate": _object(response=_TEXT, thinking_if_any=_TEXT, **_OLLAMA_HEAD, **_OLLAMA_END),
        "OllamaEmbed": _object(
            model=_TEXT, embeddings=_list(_VECTOR), total_duration=_COUNT, load_duration=_COUNT, prompt_eval_count=_COUNT
        ),
        "OllamaEmbedding": _object(embedding=_VECTOR),
        "OllamaDetails": _object(
            parent_model=_TEXT,
            format=_TEXT,
            family=_TEXT,
            families=_list(_TEXT),
            parameter_size=_TEXT,
            quantization_level=_TEXT,
        ),
        "OllamaModels": _object(models=_list(_object(modified_at=_TEXT, size=_COUNT, **_OLLAMA_MODEL))),
        "OllamaRunning": _object(
            models=_list(_object(size=_COUNT, expires_at=_TEXT, size_vram=_COUNT, context_length=_COUNT, **_OLLAMA_MODEL))
        ),
        "OllamaShow": _object(
            modelfile=_TEXT,
            parameters=_TEXT,
            template=_TEXT,
            license=_TEXT,
            details=_ref("OllamaDetails"),
            model_info=_ANY_OBJECT,
            capabilities=_list(_TEXT),
            modified_at=_TEXT,
        ),
        "OllamaError": _object(error=_TEXT),
        # llama.cpp's
        "LlamaCompletion": _object(
            index_if_any=_COUNT,
            content_if_any=_TEXT,
            tokens_if_any=_list(_COUNT),
            id_slot_if_any=_INTEGER,
            stop_if_any=_FLAG,
            model_if_any=_TEXT,
            tokens_predicted_if_any=_COUNT,
            tokens_evaluated_if_any=_COUNT,
            generation_settings_if_any=_ANY_OBJECT,
            prompt_if_any=_TEXT,
            has_new_line_if_any=_FLAG,
            truncated_if_any=_FLAG,
            stop_type_if_any=_word("eos", "limit", "word"),
            stopping_word_if_any=_TEXT,
            tokens_cached_if_any=_COUNT,
            **_TIMES_IF_ASKED,
            completion_probabilities_if_any=_list(_object(top_logprobs=_list(_ref("LlamaToken")), **_LLAMA_TOKEN)),
        ),
        "LlamaToken": _object(**_LLAMA_TOKEN),
        "LlamaPrompt": _object(prompt=_TEXT),
        "LlamaTokens": _object(tokens=_list(_any(_COUNT, _object(id=_COUNT, piece=_any(_TEXT, _list(_COUNT)))))),
        "LlamaEmbeddings": _list(_object(index=_COUNT, embedding=_list(_VECTOR))),
        "LlamaProps": _object(
            default_generation_settings=_object(params=_ANY_OBJECT, n_ctx=_COUNT),
            total_slots=_COUNT,
            model_alias=_TEXT,
            model_path=_TEXT,
            modalities=_map(_FLAG),
            endpoint_slots=_FLAG,
            endpoint_props=_FLAG,
            endpoint_metrics=_FLAG,
            chat_template=_TEXT,
            chat_template_caps=_map(_FLAG),
            bos_token=_TEXT,
            eos_token=_TEXT,
            build_info=_TEXT,
            is_sleeping=_FLAG,
        ),
        "LlamaSlots": _list(
            _object(
                id=_COUNT,
                n_ctx=_COUNT,
                is_processing=_FLAG,
                params_if_any=_ANY_OBJECT,
                next_token_if_any=_object(has_next_token=_FLAG, n_remain=_INTEGER, n_decoded=_COUNT),
            )
        ),
        "LlamaError": _object(error=_object(code=_COUNT, message=_TEXT, type=_TEXT, **_SIZES_IF_TOO_LONG)),
        "InputTokens": _object(object=_word("response.input_tokens"), input_tokens=_COUNT),
        # Encoders: Jina's and Cohere's, vLLM's, text-embeddings-inference's
        "Ranking": _object(
            id=_TEXT,
            model=_TEXT,
            results=_list(_object(index=_COUNT, document_if_any=_object(text=_TEXT), relevance_score=_NUMBER)),
            usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
            meta=_object(
                api_version=_object(version=_TEXT),
                billed_units=_object(search_units=_COUNT),
                tokens=_object(input_tokens=_COUNT),
            ),
        ),
        "CohereEmbeddings": _object(
            id=_TEXT,
            embeddings=_object(float_if_any=_list(_VECTOR), base64_if_any=_list(_TEXT)),
            texts=_list(_TEXT),
            meta=_object(api_version=_object(version=_TEXT), billed_units=_object(input_tokens=_COUNT)),
            response_type=_TEXT,
        ),
        "TextsUsage": _object(prompt_tokens=_COUNT, total_tokens=_COUNT, completion_tokens=_COUNT, prompt_tokens_details=_NULL),
        "Scores": _object(data=_list(_object(index=_COUNT, object=_word("score"), score=_NUMBER)), **_LIST_OF_TEXTS),
        "Classes": _object(data=_list(_object(index=_COUNT, label=_TEXT, probs=_VECTOR, num_classes=_COUNT)), **_LIST_OF_TEXTS),
        "Pooling": _object(
            data=_list(_object(index=_COUNT, object=_word("pooling"), data=_any(_EMBEDDING, _list(_VECTOR)))),
            **_LIST_OF_TEXTS,
        ),
        "TeiEmbeddings": _list(_VECTOR),
        "TeiPrediction": _list(_object(score=_NUMBER, label=_TEXT)),
        "TeiRanking": _list(_object(index=_COUNT, text_if_any=_TEXT, score=_NUMBER)),
        "TeiTokens": _list(_list(_object(id=_COUNT, text=_TEXT, special=_FLAG, start=_NULL, stop=_NULL))),
        "TeiInfo": _object(
            model_id=_TEXT,
            model_sha=_NULL,
            model_dtype=_TEXT,
            model_type=_or_null(_ANY_OBJECT),
            max_concurrent_requests=_or_null(_COUNT),
            max_input_length=_COUNT,
            max_batch_tokens=_COUNT,
            max_batch_requests=_NULL,
            max_client_batch_size=_COUNT,
            auto_truncate=_FLAG,
            tokenization_workers=_COUNT,
            version=_TEXT,
            sha=_NULL,
            docker_label=_NULL,
        ),
        "TeiError": _object(error=_TEXT, error_type=_TEXT),
        # text-generation-inference's
        "TgiAnswer": _object(
            generated_text=_TEXT,
            details_if_any=_object(**_TGI_END, prefill=_list(_ANYTHING), tokens=_list(_ref("TgiToken"))),
        ),
        "TgiToken": _object(id=_COUNT, text=_TEXT, logprob=_NUMBER, special=_FLAG),
        "TgiEvent": _object(
            index=_COUNT,
            token=_ref("TgiToken"),
            generated_text=_or_null(_TEXT),
            details=_or_null(_object(**_TGI_END, input_length=_COUNT)),
        ),
        # Cohere's chat
        "CohereAnswer": _object(
            id=_TEXT,
            finish_reason=_word("COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL"),
            message=_object(
                role=_word("assistant"),
                content=_list(
                    _any(_object(type=_word("text"), text=_TEXT), _object(type=_word("thinking"), thinking=_TEXT)),
                ),
                tool_calls_if_any=_list(
                    _object(id=_TEXT, type=_word("function"), function=_object(name=_TEXT, arguments=_TEXT)),
                ),
            ),
            usage=_object(billed_units=_map(_COUNT), tokens=_map(_COUNT), cached_tokens=_COUNT),
        ),
        "CohereEvent": {"type": "object", "required": ["type"]},
        "CohereError": _object(message=_TEXT),
        # vLLM's tokens, and Penstock's own
        "Tokens": _object(count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_or_null(_list(_TEXT))),
        "Detokenized": _object(prompt=_TEXT, content=_TEXT),
        "Success": _object(success=_FLAG),
        "Status": _object(status=_TEXT),
        "Version": _object(version=_TEXT),
        "Load": _object(
            state=_TEXT,
            server_load=_COUNT,
            requests_running=_COUNT,
            requests_waiting=_COUNT,
            waiting_for=_or_null(_TEXT),
            kv_blocks_free=_COUNT,
            kv_blocks=_COUNT,
            kv_waste_ratio=_NUMBER,
            adapters_if_any=_map(_COUNT),
            sustained=_map(_NUMBER),
            desired_replicas=_COUNT,
            models_if_any=_list(
                _object(
                    name=_TEXT,
                    state=_TEXT,
                    requests_running=_COUNT,
                    requests_waiting=_COUNT,
                    requests_waiting_for_load=_COUNT,
                    memory_bytes=_map(_COUNT),
                    machine_s=_NUMBER,
                    last_used_s=_or_null(_NUMBER),
                )
            ),
            memory_if_any=_object(limit_bytes=_COUNT, free_bytes=_COUNT, stuck_bytes=_COUNT),
        ),
        "Pool": _object(
            block_size=_COUNT,
            blocks=_COUNT,
            states=_map(_COUNT),
            waste_ratio=_NUMBER,
            map=_list(
                {
                    "description": "The state of neighbouring blocks, their number and, if a request holds them, its index.",
                    "type": "array",
                    "items": _any(_word("free", "cached", "held", "shared", "adapter", "null"), _COUNT, _NULL),
                    "minItems": 2,
                    "maxItems": 3,
                }
            ),
            owners=_list(
                _object(
                    request=_or_null(_TEXT),
                    choice_if_any=_COUNT,
                    blocks=_COUNT,
                    tokens_if_any=_COUNT,
                    computed_tokens_if_any=_COUNT,
                )
            ),
        ),
        "RequestList": _object(object=_word("list"), data=_list(_ref("Request"))),
        "Request": _object(
            id=_TEXT,
            object=_word("request"),
            created=_INTEGER,
            age_ms=_NUMBER,
            summary=_TEXT,
            choices=_list(_ref("RequestChoice")),
            forgotten_choices=_COUNT,
        ),
        "RequestChoice": _object(
            index=_COUNT,
            state=_TEXT,
            finish_reason=_or_null(_TEXT),
            summary=_TEXT,
            prompt_tokens=_COUNT,
            completion_tokens=_COUNT,
            time_ms=_NAMES_OF_PARTS,
            waited=_object(for_ms=_NAMES_OF_PARTS, now_for=_or_null(_TEXT), came_before=_COUNT, went_first=_COUNT),
            prefix=_or_null(_object(hit_tokens=_COUNT, stopped_at=_COUNT, because=_TEXT, evicted_ms_before_if_any=_NUMBER)),
            prefill=_object(steps=_COUNT, tokens=_COUNT),
            resume=_object(steps=_COUNT, tokens=_COUNT),
            decode=_object(steps=_COUNT, forced_tokens=_COUNT, with_prompts_ms=_NUMBER),
            sat_out=_object(steps=_COUNT, ms=_NUMBER),
            batch=_object(mean=_NUMBER, max=_COUNT),
            longest_gap=_or_null(
                _object(
                    ms=_NUMBER,
                    because=_TEXT,
                    step_if_any=_object(ms=_NUMBER, requests=_COUNT, prompts=_COUNT, prompt_tokens=_COUNT),
                )
            ),
            preemptions=_list(
                _object(
                    after_ms=_NUMBER,
                    because=_TEXT,
                    method=_word("swap", "recompute"),
                    waited_ms=_NUMBER,
                    waited_for_ms=_NAMES_OF_PARTS,
                    lost_tokens=_COUNT,
                    is_over=_FLAG,
                )
            ),
        ),
        "RequestCancelled": _object(id=_TEXT, object=_word("request"), cancelled=_FLAG),
        "Error": _object(error=_object(message=_TEXT, type=_TEXT, param=_or_null(_TEXT), code=_TEXT, **_SIZES_IF_TOO_LONG)),
    }
)
"""The schemas that others refer to, by their names in the document."""

Content = Mapping[str, Schema]
"""Media type -> schema of the body; of a stream, that of one event or one line."""


def _json(*names: str) -> Content:
    refs = [_ref(name) for name in names]
    return {JSON: refs[0] if len(refs) == 1 else _any(*refs)}


_LLAMA_ANSWERS = {
    JSON: _any(_ref("LlamaCompletion"), _list(_ref("LlamaCompletion"))),
    EVENTS: _event("LlamaCompletion", "LlamaError"),
}
_DONE = _object(event_if_any=_TEXT, data=_word("[DONE]"))
_COMPLETIONS = {**_json("Completion"), EVENTS: _any(_event("CompletionChunk"), _DONE)}
_CHATS = {**_json("ChatCompletion"), EVENTS: _any(_event("ChatChunk"), _DONE)}

ANSWERS: Mapping[str, Content] = MappingProxyType(
    {
        "POST /v1/completions": _COMPLETIONS,
        "POST /completions": _COMPLETIONS,
        "POST /v1/chat/completions": _CHATS,
        "POST /chat/completions": _CHATS,
        "POST /v1/embeddings": _json("Embeddings"),
        "POST /embeddings": _json("Embeddings", "LlamaEmbeddings"),
        "POST /v1/messages": {**_json("AnthropicMessage"), EVENTS: _event("AnthropicEvent")},
        "POST /v1/messages/count_tokens": _json("AnthropicCount"),
        "POST /v1/responses": {**_json("Response"), EVENTS: _event("ResponseEvent")},
        "POST /responses": {**_json("Response"), EVENTS: _event("ResponseEvent")},
        "POST /v1/chat/completions/input_tokens": _json("InputTokens"),
        "POST /chat/completions/input_tokens": _json("InputTokens"),
        "GET /v1/responses/{response_id}": _json("Response"),
        "DELETE /v1/responses/{response_id}": _json("ResponseForgotten"),
        "POST /v1/responses/{response_id}/cancel": _json("Response"),
        "GET /v1/responses/{response_id}/input_items": _json("ResponseItems"),
        "POST /v1/load_lora_adapter": {PLAIN: _TEXT},
        "POST /v1/unload_lora_adapter": {PLAIN: _TEXT},
        "POST /completion": _LLAMA_ANSWERS,
        "POST /infill": _LLAMA_ANSWERS,
        "POST /apply-template": _json("LlamaPrompt"),
        "POST /embedding": _json("LlamaEmbeddings"),
        "GET /props": _json("LlamaProps"),
        "GET /slots": _json("LlamaSlots"),
        "POST /tokenize": _json("Tokens", "TeiTokens", "LlamaTokens"),
        "POST /detokenize": _json("Detokenized"),
        "POST /v1/rerank": _json("Ranking"),
        "POST /v2/rerank": _json("Ranking"),
        "POST /rerank": _json("Ranking", "TeiRanking"),
        "POST /v2/embed": _json("CohereEmbeddings"),
        "POST /v2/chat": {**_json("CohereAnswer"), EVENTS: _event("CohereEvent")},
        "POST /v1/score": _json("Scores"),
        "POST /score": _json("Scores"),
        "POST /classify": _json("Classes"),
        "POST /pooling": _json("Pooling"),
        "POST /embed": _json("TeiEmbeddings"),
        "POST /predict": {JSON: _any(_ref("TeiPrediction"), _list(_ref("TeiPrediction")))},
        "POST /generate": {**_json("TgiAnswer"), EVENTS: _event("TgiEvent", "TeiError")},
        "POST /generate_stream": {EVENTS: _event("TgiEvent", "TeiError")},
        "POST /": {
            JSON: _any(_list(_ref("TgiAnswer")), *map(_ref, ("TeiEmbeddings", "TeiRanking", "TeiPrediction"))),
            EVENTS: _event("TgiEvent", "TeiError"),
        },
        "GET /info": _json("TeiInfo"),
        "POST /api/chat": {**_json("OllamaChat"), LINES: _any(_ref("OllamaChat"), _ref("OllamaError"))},
        "POST /api/generate": {**_json("OllamaGenerate"), LINES: _any(_ref("OllamaGenerate"), _ref("OllamaError"))},
        "POST /api/embed": _json("OllamaEmbed"),
        "POST /api/embeddings": _json("OllamaEmbedding"),
        "POST /api/show": _json("OllamaShow"),
        "POST /api/pull": {**_json("Status"), LINES: _ref("Status")},
        "GET /api/tags": _json("OllamaModels"),
        "GET /api/ps": _json("OllamaRunning"),
        "GET /api/version": _json("Version"),
        "POST /models/load": _json("Success"),
        "POST /models/unload": _json("Success"),
        "GET /v1/models": _json("ModelList", "AnthropicModelList"),
        "GET /models": _json("ModelList", "AnthropicModelList"),
        "GET /v1/models/{model_id}": _json("ModelCard", "AnthropicModel"),
        "GET /v1/requests": _json("RequestList"),
        "GET /v1/requests/{request_id}": _json("Request"),
        "DELETE /v1/requests/{request_id}": _json("RequestCancelled"),
        "GET /health": _json("Status"),
        "GET /ready": _json("Status"),
        "GET /load": _json("Load"),
        "GET /kv": _json("Pool"),
        "GET /version": _json("Version"),
        "GET /metrics": {PLAIN: _TEXT},
    }
)
"""The answers of an operation when all is well, by its method and its path in the document."""


def error_schema(path: str) -> Schema:
    """An error of an operation. Faults of a request's head and length are told in OpenAI's words everywhere."""
    own = [name for name, paths in _OTHER_ERRORS.items() if f"{path}/".startswith(paths)]
    refs = [_ref(name) for name in (*own, "Error")]
    return refs[0] if len(refs) == 1 else _any(*refs)


_OTHER_ERRORS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "AnthropicError": ("/v1/messages/", "/v1/models/"),
        "LlamaError": (
            *("/completion/", "/infill/", "/apply-template/", "/embedding/", "/props/", "/slots/"),
            *("/tokenize/", "/embeddings/"),
        ),
        "OllamaError": ("/api/",),
        "TeiError": ("/embed/", "/predict/", "/rerank/", "/tokenize/", "/info/", "/generate/", "/generate_stream/", "//"),
        "CohereError": ("/v2/chat/",),
    }
)
"""Errors of other shapes than OpenAI's, and how the paths begin that answer with them."""
