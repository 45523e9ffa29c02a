"""What /openapi.json says beyond what FastAPI finds out by itself: bodies, answers, errors, and what can follow.

FastAPI does not know the bodies, because gateway/protocol/json_body.py reads them, which is stricter. It does not know
the answers, because they are written without its models. Validation errors are 400 here, and not FastAPI's 422.
"""

import json
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from gateway.protocol.answer_schemas import ANSWERS, SCHEMAS, json_of
from gateway.protocol.error_shapes import ANTHROPIC_PATHS

METHODS = frozenset({"get", "post", "delete"})
ERRORS = {"4XX": "The request is refused.", "5XX": "The server cannot answer now."}

# What follows an answer: the operations that take the id of what was made, by the name of their parameter.
FOLLOWERS: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("post", "/v1/files"): {
        "file_id": ("retrieve_file", "file_content", "delete_file"),
        "input_file_id": ("create_batch",),
    },
    ("post", "/v1/uploads"): {"upload_id": ("add_upload_part", "complete_upload", "cancel_upload")},
    ("post", "/v1/batches"): {"batch_id": ("retrieve_batch", "cancel_batch", "delete_batch")},
    ("post", "/v1/messages/batches"): {
        "message_batch_id": ("retrieve_messages_batch", "cancel_messages_batch", "delete_messages_batch"),
    },
    ("post", "/v1/tasks"): {"task_id": ("retrieve_task", "cancel_task", "delete_task", "retry_task")},
    ("post", "/v1/responses"): {
        "response_id": ("retrieve_response", "cancel_response", "delete_response", "list_input_items"),
    },
    ("post", "/v1/conversations"): {
        "conversation_id": (
            *("retrieve_conversation", "update_conversation", "delete_conversation"),
            *("list_conversation_items", "create_conversation_items"),
        ),
    },
}


# The bodies of `json_body` by the references that stand for their schemas until /openapi.json is asked for: to make all
# schemas takes 0.2 s and 2 MB, and most gateways are never asked.
_BODIES: dict[str, type[BaseModel]] = {}


def described(app: FastAPI, model_names: Sequence[str]) -> bytes:
    """Return the text of /openapi.json. This takes long."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    document["components"] = {"schemas": SCHEMAS}
    for path, operations in document["paths"].items():
        for method in METHODS & operations.keys():
            _describe_body(operations[method])
            _complete(operations[method], method, path)
            _name_models(operations[method], model_names, is_needed=path == "/v1/responses/compact")
    return json.dumps(document, ensure_ascii=False).encode()


def _describe_body(operation: dict[str, Any]) -> None:
    for content in operation.get("requestBody", {}).get("content", {}).values():
        if (model := _BODIES.get(content["schema"].get("$ref", ""))) is not None:
            content["schema"] = _inlined(model.model_json_schema())


def _complete(operation: dict[str, Any], method: str, path: str) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    success = next(response for status, response in responses.items() if status[0] == "2")
    for status, description in ERRORS.items():
        responses.setdefault(status, {"description": description})
    for status, response in responses.items():
        if status[0] in "45":
            response["content"] = json_of("AnthropicError" if path.startswith(ANTHROPIC_PATHS) else "Error")
    if (method, path) in ANSWERS:
        success["content"] = ANSWERS[method, path]
    if path == "/ready":
        responses["503"] = {"description": "Something is missing.", "content": ANSWERS[method, path]}
    if links := _links(method, path):
        success["links"] = links


def _name_models(operation: dict[str, Any], model_names: Sequence[str], is_needed: bool) -> None:
    """Say in the schema of the body which models there are, and whether it must name one."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"type": "string", "enum": list(model_names)}
            required = [name for name in schema.get("required", ()) if name != "model"]
            schema["required"] = ["model", *required] if is_needed else required
            if not schema["required"]:
                del schema["required"]


def _links(method: str, path: str) -> dict[str, Any]:
    """Return OpenAPI links from what was made to the operations that take its id."""
    links: dict[str, Any] = {}
    for name, operations in FOLLOWERS.get((method, path), {}).items():
        for operation in operations:
            link: dict[str, Any] = {"operationId": operation}
            if operation == "create_batch":
                batch = {name: "$response.body#/id", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
                link["requestBody"] = batch
            else:
                link["parameters"] = {name: "$response.body#/id"}
            links[operation] = link
    return links


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is one JSON object with the schema of `model`."""
    reference = f"#/bodies/{model.__module__}.{model.__name__}"
    _BODIES[reference] = model
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": {"$ref": reference}}}}}


def form_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is a multipart form with the fields of `schema`."""
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


def _inlined(schema: dict[str, Any]) -> Any:
    """Return `schema` with each `$ref` replaced by its definition, because the schema of a path cannot have `$defs`."""
    definitions = schema.pop("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$ref" in node:
            return resolve(definitions[node["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in node.items()}

    return resolve(schema)
