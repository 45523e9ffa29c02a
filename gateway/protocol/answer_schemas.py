"""JSON schemas of the answers, for /openapi.json: what each endpoint sends where it succeeds, and the error object.

They say which fields are always there and what type they have; clients may meet more fields. Knows paths and formats;
does not know how the answers are made.
"""

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
ANY_OBJECT: Schema = {"type": "object"}
MAYBE_TEXT: Schema = {"type": ["string", "null"]}
MAYBE_NUMBER: Schema = {"type": ["integer", "null"]}
MAYBE_OBJECT: Schema = {"type": ["object", "null"]}
MAYBE_NUMBERS = dict.fromkeys(
    ("in_progress_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at", "cancelled_at"),
    MAYBE_NUMBER,
)
SSE: Schema = {"text/event-stream": {}}  # OpenAPI 3.1 has no words for the form of events


def fixed(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def array(item: Schema) -> Schema:
    return {"type": "array", "items": item}


def object_of(optional: dict[str, Schema] | None = None, /, **required: Schema) -> Schema:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def page_of(name: str) -> Schema:
    """Return the schema of a page of a list. The ids of an empty page are null, or "" in a list of input items."""
    ids = {"first_id": MAYBE_TEXT, "last_id": MAYBE_TEXT}
    return object_of(object=fixed("list"), data=array(reference(name)), has_more=FLAG, **ids)


def reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


_CHOICE = {"index": NUMBER, "finish_reason": fixed("stop", "length", "tool_calls", "content_filter", "function_call")}
_MESSAGE = object_of({"tool_calls": array(ANY_OBJECT)}, role=fixed("assistant"), content=MAYBE_TEXT, refusal=MAYBE_TEXT)
_USAGE = object_of(prompt_tokens=NUMBER, completion_tokens=NUMBER, total_tokens=NUMBER)
_READ = object_of(prompt_tokens=NUMBER, total_tokens=NUMBER)
_COUNTS = object_of(total=NUMBER, completed=NUMBER, failed=NUMBER)

SCHEMAS: dict[str, Schema] = {
    "Error": object_of(error=object_of(message=TEXT, type=TEXT, param=MAYBE_TEXT, code=MAYBE_TEXT)),
    "AnthropicError": object_of(type=fixed("error"), error=object_of(type=TEXT, message=TEXT), request_id=MAYBE_TEXT),
    "Message": object_of(
        id=TEXT,
        type=fixed("message"),
        role=fixed("assistant"),
        model=TEXT,
        content=array(object_of(type=fixed("text", "thinking", "tool_use"))),
        stop_reason=TEXT,
        stop_sequence=MAYBE_TEXT,
        usage=object_of(input_tokens=NUMBER, cache_read_input_tokens=NUMBER, output_tokens=NUMBER),
    ),
    "MessageBatch": object_of(
        id=TEXT,
        type=fixed("message_batch"),
        processing_status=fixed("in_progress", "canceling", "ended"),
        request_counts=object_of(processing=NUMBER, succeeded=NUMBER, errored=NUMBER, canceled=NUMBER, expired=NUMBER),
        created_at=TEXT,
        expires_at=TEXT,
        ended_at=MAYBE_TEXT,
        results_url=MAYBE_TEXT,
    ),
    "MessageBatchList": object_of(
        data=array(reference("MessageBatch")), has_more=FLAG, first_id=MAYBE_TEXT, last_id=MAYBE_TEXT
    ),
    "DeletedMessageBatch": object_of(id=TEXT, type=fixed("message_batch_deleted")),
    "MessageTokens": object_of(input_tokens=NUMBER),
    "ChatCompletion": object_of(
        id=TEXT,
        object=fixed("chat.completion"),
        created=NUMBER,
        model=TEXT,
        choices=array(object_of(**_CHOICE, message=_MESSAGE, logprobs=MAYBE_OBJECT)),
        usage=_USAGE,
    ),
    "Completion": object_of(
        id=TEXT,
        object=fixed("text_completion"),
        created=NUMBER,
        model=TEXT,
        choices=array(object_of(**_CHOICE, text=TEXT, logprobs=MAYBE_OBJECT)),
        usage=_USAGE,
    ),
    "Embeddings": object_of(
        object=fixed("list"),
        data=array(object_of(object=fixed("embedding"), index=NUMBER, embedding={"type": ["array", "string"]})),
        model=TEXT,
        usage=_READ,
    ),
    "Ranking": object_of(
        id=TEXT,
        model=TEXT,
        results=array(object_of({"document": ANY_OBJECT}, index=NUMBER, relevance_score={"type": "number"})),
        usage=_READ,
    ),
    "Response": object_of(
        id=TEXT,
        object=fixed("response"),
        created_at=NUMBER,
        model=TEXT,
        status=fixed("completed", "failed", "in_progress", "cancelled", "queued", "incomplete"),
        output=array(object_of(type=TEXT)),
        error=MAYBE_OBJECT,
        usage=MAYBE_OBJECT,
        background=FLAG,
    ),
    "Compaction": object_of(
        id=TEXT,
        object=fixed("response.compaction"),
        created_at=NUMBER,
        output=array(object_of(id=TEXT, type=TEXT)),
        usage=ANY_OBJECT,
    ),
    "InputItem": object_of(id=TEXT, type=TEXT),
    "Conversation": object_of(id=TEXT, object=fixed("conversation"), created_at=NUMBER, metadata=ANY_OBJECT),
    "InputTokens": object_of(object=fixed("response.input_tokens"), input_tokens=NUMBER),
    "Model": object_of(
        {"max_model_len": MAYBE_NUMBER}, id=TEXT, object=fixed("model"), created=NUMBER, owned_by=TEXT, root=TEXT
    ),
    "ModelList": object_of(object=fixed("list"), data=array(reference("Model"))),
    "File": object_of(
        {"expires_at": MAYBE_NUMBER},
        id=TEXT,
        object=fixed("file"),
        bytes=NUMBER,
        created_at=NUMBER,
        filename=TEXT,
        purpose=TEXT,
        status=fixed("uploaded", "processed", "error"),
    ),
    "Upload": object_of(
        {"file": {"anyOf": [reference("File"), {"type": "null"}]}},
        id=TEXT,
        object=fixed("upload"),
        bytes=NUMBER,
        created_at=NUMBER,
        expires_at=NUMBER,
        filename=TEXT,
        purpose=TEXT,
        status=fixed("pending", "completed", "cancelled", "expired"),
    ),
    "UploadPart": object_of(id=TEXT, object=fixed("upload.part"), created_at=NUMBER, upload_id=TEXT),
    "Batch": object_of(
        MAYBE_NUMBERS,
        id=TEXT,
        object=fixed("batch"),
        endpoint=TEXT,
        input_file_id=TEXT,
        completion_window=TEXT,
        status=fixed(
            "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
        ),
        created_at=NUMBER,
        request_counts=_COUNTS,
        output_file_id=MAYBE_TEXT,
        error_file_id=MAYBE_TEXT,
        metadata=MAYBE_OBJECT,
        tidegate=ANY_OBJECT,
    ),
    "BatchEstimate": object_of(
        object=fixed("batch.estimate"),
        completion_window=TEXT,
        lines=NUMBER,
        prompt_tokens=ANY_OBJECT,
        output_tokens=ANY_OBJECT,
        estimate=MAYBE_OBJECT,
        earliest_window=MAYBE_TEXT,
        interactive=array(ANY_OBJECT),
    ),
    "Deleted": object_of(id=TEXT, object=TEXT, deleted={"const": True}),
    "Tokens": object_of(count=NUMBER, max_model_len=MAYBE_NUMBER, tokens=array(NUMBER)),
    "TokenText": object_of(prompt=TEXT),
    "Task": object_of(
        id=TEXT,
        object=fixed("task"),
        state=fixed("queued", "running", "done", "dead", "cancelled"),
        created_at=NUMBER,
        ended_at=MAYBE_NUMBER,
        service_tier=TEXT,
        timeout_s={"type": ["number", "null"]},
        attempts=NUMBER,
        error=MAYBE_OBJECT,
        metadata=MAYBE_OBJECT,
    ),
    "TaskList": object_of(object=fixed("list"), data=array(reference("Task")), has_more=FLAG),
    "DeadLetter": object_of(
        id=TEXT,
        object=fixed("dead_letter"),
        tier=TEXT,
        owner=MAYBE_TEXT,
        batch_id=MAYBE_TEXT,
        custom_id=MAYBE_TEXT,
        attempts=NUMBER,
        reason=TEXT,
        died_at=NUMBER,
    ),
    "DeadLetterList": object_of(object=fixed("list"), data=array(reference("DeadLetter")), has_more=FLAG),
    "AuditList": object_of(
        object=fixed("list"),
        data=array(
            object_of(
                id=TEXT,
                object=fixed("audit_entry"),
                at_ms=NUMBER,
                action=TEXT,
                subject=TEXT,
                key=MAYBE_TEXT,
                address=MAYBE_TEXT,
                gateway=TEXT,
            )
        ),
        has_more=FLAG,
    ),
    "FileList": page_of("File"),
    "BatchList": page_of("Batch"),
    "InputItemList": page_of("InputItem"),
    "Readiness": object_of(
        ready=FLAG, missing=array(TEXT), draining=FLAG, waiting=ANY_OBJECT, workers=array(ANY_OBJECT)
    ),
}


def json_of(name: str) -> Schema:
    return {"application/json": {"schema": reference(name)}}


# Content of the answers with status 200, or 202. Answers that are not here are objects without a fixed form.
ANSWERS: dict[tuple[str, str], Schema] = {
    ("post", "/v1/chat/completions"): json_of("ChatCompletion") | SSE,
    ("post", "/v1/completions"): json_of("Completion") | SSE,
    ("post", "/v1/embeddings"): json_of("Embeddings"),
    ("post", "/v1/rerank"): json_of("Ranking"),
    ("post", "/v1/responses"): json_of("Response") | SSE,
    ("get", "/v1/responses/{response_id}"): json_of("Response") | SSE,
    ("post", "/v1/responses/{response_id}/cancel"): json_of("Response"),
    ("delete", "/v1/responses/{response_id}"): json_of("Deleted"),
    ("get", "/v1/responses/{response_id}/input_items"): json_of("InputItemList"),
    ("post", "/v1/responses/compact"): json_of("Compaction"),
    ("post", "/v1/responses/input_tokens"): json_of("InputTokens"),
    ("post", "/v1/messages"): json_of("Message") | SSE,
    ("post", "/v1/messages/count_tokens"): json_of("MessageTokens"),
    ("post", "/v1/conversations"): json_of("Conversation"),
    ("get", "/v1/conversations/{conversation_id}"): json_of("Conversation"),
    ("post", "/v1/conversations/{conversation_id}"): json_of("Conversation"),
    ("delete", "/v1/conversations/{conversation_id}"): json_of("Deleted"),
    ("get", "/v1/conversations/{conversation_id}/items"): json_of("InputItemList"),
    ("post", "/v1/conversations/{conversation_id}/items"): json_of("InputItemList"),
    ("get", "/v1/conversations/{conversation_id}/items/{item_id}"): json_of("InputItem"),
    ("delete", "/v1/conversations/{conversation_id}/items/{item_id}"): json_of("Conversation"),
    ("post", "/v1/messages/batches"): json_of("MessageBatch"),
    ("get", "/v1/messages/batches"): json_of("MessageBatchList"),
    ("get", "/v1/messages/batches/{message_batch_id}"): json_of("MessageBatch"),
    ("post", "/v1/messages/batches/{message_batch_id}/cancel"): json_of("MessageBatch"),
    ("delete", "/v1/messages/batches/{message_batch_id}"): json_of("DeletedMessageBatch"),
    ("get", "/v1/messages/batches/{message_batch_id}/results"): {"application/x-jsonl": {}},
    ("get", "/v1/models"): json_of("ModelList"),
    ("get", "/v1/models/{model}"): json_of("Model"),
    ("post", "/v1/files"): json_of("File"),
    ("get", "/v1/files"): json_of("FileList"),
    ("get", "/v1/files/{file_id}"): json_of("File"),
    ("delete", "/v1/files/{file_id}"): json_of("Deleted"),
    ("get", "/v1/files/{file_id}/content"): dict.fromkeys(("application/octet-stream", "application/jsonl"), {}),
    ("post", "/v1/uploads"): json_of("Upload"),
    ("post", "/v1/uploads/{upload_id}/parts"): json_of("UploadPart"),
    ("post", "/v1/uploads/{upload_id}/complete"): json_of("Upload"),
    ("post", "/v1/uploads/{upload_id}/cancel"): json_of("Upload"),
    ("post", "/v1/batches"): json_of("Batch"),
    ("post", "/v1/batches/estimate"): json_of("BatchEstimate"),
    ("get", "/v1/batches"): json_of("BatchList"),
    ("get", "/v1/batches/{batch_id}"): json_of("Batch"),
    ("post", "/v1/batches/{batch_id}/cancel"): json_of("Batch"),
    ("delete", "/v1/batches/{batch_id}"): json_of("Deleted"),
    ("post", "/v1/tasks"): {"application/json": {"schema": {"oneOf": [reference("Task"), reference("TaskList")]}}},
    ("get", "/v1/tasks"): json_of("TaskList"),
    ("get", "/v1/tasks/{task_id}"): json_of("Task"),
    ("delete", "/v1/tasks/{task_id}"): json_of("Task"),
    ("post", "/v1/tasks/{task_id}/cancel"): json_of("Task"),
    ("post", "/v1/tasks/{task_id}/retry"): json_of("Task"),
    ("get", "/admin/audit"): json_of("AuditList"),
    ("get", "/admin/dead-letters"): json_of("DeadLetterList"),
    ("post", "/admin/dead-letters/{letter_id}/retry"): json_of("DeadLetter"),
    ("delete", "/admin/dead-letters/{letter_id}"): json_of("Deleted"),
    ("post", "/tokenize"): json_of("Tokens"),
    ("post", "/detokenize"): json_of("TokenText"),
    ("get", "/ready"): json_of("Readiness"),
    ("get", "/metrics"): {"text/plain": {"schema": TEXT}},
}
