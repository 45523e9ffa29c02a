"""Schemas of other projects' resources, as strict as `kubernetes-validate --strict`, in tests/deploy/schemas.

`python -m tests.deploy.crds write CRD.yaml…`, in the environment of `make test-helm`, writes them from
CustomResourceDefinitions: without descriptions, and with what these copy of Kubernetes' own pods and containers left to
Kubernetes' schemas.
"""

import json
import sys
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import yaml

SCHEMAS = Path(__file__).parent / "schemas"
KUBERNETES = "kubernetes-json-schema/v1.37.0-local-strict/_definitions.json"
KEPT = ("type", "enum", "pattern", "required", "minimum", "maximum", "minItems", "maxItems", "minLength", "maxLength")
# Objects with such fields are Kubernetes' own, perhaps with further fields beside.
OWN = {"PodSpec": {"containers", "volumes", "restartPolicy"}, "Container": {"image", "env", "volumeMounts"}}
# What the manifests of the tests do not use, and would be most of a schema.
LEFT_OUT = {"status", "alibi", "explainer", "huggingface", "lightgbm", "onnx", "paddle", "pmml", "pytorch", "sklearn"}
LEFT_OUT |= {"tensorflow", "transformer", "triton", "xgboost", "workerSpec"}

Schema = dict[str, Any]


@cache
def kubernetes() -> Schema:
    """Return Kubernetes' definitions, from the package `kubernetes-validate`."""
    contents: Schema = json.loads((files("kubernetes_validate") / KUBERNETES).read_text(encoding="utf-8"))
    return contents


def fields_of(own: str) -> Schema:
    """Return the fields of a Kubernetes type."""
    fields: Schema = kubernetes()["$defs"][f"io.k8s.api.core.v1.{own}"]["properties"]
    return fields


def reduced(schema: Schema) -> Schema:
    """Return a CRD's schema as a JSON schema that refuses fields which it does not know."""
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    result = {key: schema[key] for key in KEPT if key in schema}
    fields: Schema = schema.get("properties", {})
    own = next((name for name, marks in OWN.items() if marks <= set(fields)), None)
    known = set(fields_of(own)) if own else set()
    if own:
        result["x-own"] = own
    if fields:
        result["properties"] = {name: reduced(fields[name]) for name in fields if name not in LEFT_OUT | known}
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        result["additionalProperties"] = reduced(schema["additionalProperties"])
    if "items" in schema:
        result["items"] = reduced(schema["items"])
    return result


def completed(schema: Any) -> Any:
    """Return a reduced schema with the fields of Kubernetes' own types."""
    if isinstance(schema, list):
        return [completed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: completed(value) for key, value in schema.items()}
    if isinstance(result.get("x-own"), str):
        result["properties"] = {**fields_of(result["x-own"]), **result["properties"]}
    return result


def path_of(api_version: str, kind: str) -> Path:
    group, _, version = api_version.partition("/")
    return SCHEMAS / f"{group}-{version}-{kind}.json"


def check(resource: Schema) -> None:
    """Exit with a message if a custom resource does not fit its schema."""
    schema = completed(json.loads(path_of(resource["apiVersion"], resource["kind"]).read_text(encoding="utf-8")))
    validator = jsonschema.Draft202012Validator({**schema, "$defs": kubernetes()["$defs"]})
    for error in validator.iter_errors(resource):
        sys.exit(f"{resource['kind']}: {error.json_path}: {error.message}")


def write(crd: Schema) -> None:
    names, group = crd["spec"]["names"], crd["spec"]["group"]
    for version in crd["spec"]["versions"]:
        if not version["served"]:
            continue
        schema = reduced(version["schema"]["openAPIV3Schema"])
        path = path_of(f"{group}/{version['name']}", names["kind"])
        path.write_text(json.dumps(schema, separators=(",", ":")) + "\n", encoding="utf-8")


def main(action: str, *paths: str) -> None:
    for path in paths:
        for document in yaml.safe_load_all(Path(path).read_text(encoding="utf-8")):
            {"check": check, "write": write}[action](document)


if __name__ == "__main__":
    main(*sys.argv[1:])
