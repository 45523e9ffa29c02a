"""OpenAPI schemas of the bodies that are not read by FastAPI: gateway/protocol/json_body.py is stricter."""

from typing import Any

from pydantic import BaseModel


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return a route's `openapi_extra` for a body that is one JSON object of `model`."""
    schema = _inlined(model.model_json_schema())
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _inlined(schema: dict[str, Any]) -> Any:
    """Return `schema` with each `$ref` replaced by its definition, since a path's schema cannot have `$defs`."""
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
