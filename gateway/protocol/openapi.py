"""OpenAPI schemas of request bodies that FastAPI does not read.

gateway/protocol/json_body.py reads these bodies, because it is stricter than FastAPI.
"""

from typing import Any

from pydantic import BaseModel


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is one JSON object with the schema of `model`."""
    schema = _inlined(model.model_json_schema())
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


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
