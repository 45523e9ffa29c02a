r"""Rewrite a grammar of texts as terminals of a larger grammar, as they are or as JSON writes them.

The input of a custom tool stands between other text of a call: in JSON, where a line feed is `\n`, or before a tag that
ends it. A lexer of llguidance ends a terminal where it cannot go on, and `"…\"` goes on where `"…\n"` has to end. So a
grammar becomes one single terminal, which can be done if no rule refers to itself. JSON escapes each character by
itself, and always in one way here, so that only the characters in strings and regular expressions are replaced.

Knows Lark's syntax as llguidance reads it; does not know tools.
"""

import json

import regex

from gateway.output.json_schema import GrammarError

_ESCAPED = ['"', "\\", *map(chr, range(0x20))]  # the characters that JSON must escape
_OTHERS = r'[^"\\\x00-\x1f]'  # all other characters, as a class of a regular expression
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
# The terminals of `%import common` that match such characters.
_COMMON = {
    "ESCAPED_STRING": r'/"([^"\\]|\\.)*"/',
    "SH_COMMENT": r"/#[^\n]*/",
    "CPP_COMMENT": r"/\/\/[^\n]*/",
    "C_COMMENT": r"/\/\*([^*]|\*+[^*\/])*\*+\//",
    "SQL_COMMENT": r"/--[^\n]*/",
    "NEWLINE": r"/(\r?\n)+/",
    "LF": r"/\n/",
    "CR": r"/\r/",
    "WS": r"/[ \t\f\r\n]+/",
    "WS_INLINE": r"/[ \t]+/",
}
_LARK = regex.compile(
    r"""
    (?P<comment> (?:\#|//)[^\n]* | ->\s*\w+ )
    | (?P<range> (?P<first>"(?:\\.|[^"\\])*") \s*\.\.\s* (?P<last>"(?:\\.|[^"\\])*") )
    | (?P<string> (?P<text>"(?:\\.|[^"\\])*")(?P<case>i?) )
    | (?P<regexp> /(?P<pattern>(?:\\.|[^/\\])+)/(?P<flags>[imslux]*) )
    | (?P<import> %import\s+common\s*(?:\.\s*(?P<names>\w+(?:\s*->\s*\w+)?)|\((?P<names>[^()]*)\)) )
    | (?P<foreign> %\w+ | @[\w-]+ | <[^<>\s]+> | ~(?!\s*[0-9]) | [A-Za-z_][\w-]*[\[{.] )
    | [!?]*(?P<defined> [A-Za-z_][\w-]* )(?=\s*:(?!:))
    | (?P<name> [A-Za-z_][\w-]* )
    """,
    regex.VERBOSE,
)
_REGEX = regex.compile(
    r"""
    (?P<class> \[\^?\]?(?:\\.|(?&class)|[^\[\]\\])*\] )
    | (?P<named> \\[dDwWsS] | \\[pP](?:\{[^{}]*\}|.) )
    | (?P<code> \\[xuU]\{(?P<hex>[0-9a-fA-F]{1,6})\} | \\x(?P<hex>[0-9a-fA-F]{2}) | \\u(?P<hex>[0-9a-fA-F]{4}) )
    | (?P<kept> \\[bBAzZ] | [()|*+?{}^$] )
    | (?P<quoted> \\(?P<character>.) )
    | (?P<dot> \. )
    | (?P<plain> . )
    """,
    regex.VERBOSE | regex.DOTALL,
)


def as_terminals(lark: str, prefix: str, *, in_json: bool) -> str | None:
    """Return definitions of terminals, of which `<prefix>R_START` matches the texts of the grammar `lark`.

    With `in_json`, it matches them as they stand between the quotation marks of a JSON string. All names begin with
    `prefix`. Return None if the grammar is more than a terminal can be: a rule refers to itself, or it speaks of white
    space between tokens, JSON schemas, special tokens or complements. Raises `GrammarError` if it cannot be read.
    """
    rewriter = _Rewriter(prefix, in_json)
    text = _LARK.sub(rewriter.rewritten, lark)
    return None if rewriter.is_foreign or rewriter.is_recursive() else text


class _Rewriter:
    def __init__(self, prefix: str, in_json: bool) -> None:
        self._prefix = prefix
        self._in_json = in_json
        self._current = ""  # the name that is being defined
        self._refers: dict[str, set[str]] = {}  # the names in the definition of each name
        self.is_foreign = False

    def is_recursive(self) -> bool:
        """Whether a name refers to itself, over others or not."""
        rest, num_left = dict(self._refers), -1
        while len(rest) != num_left:
            num_left = len(rest)
            rest = {name: names for name, names in rest.items() if not names.isdisjoint(rest)}
        return bool(rest)

    def rewritten(self, match: "regex.Match[str]") -> str:
        """Return what stands for a token of a grammar."""
        match match.lastgroup:
            case "string":
                return self._string(_decoded(match["text"]), match["case"])
            case "regexp":
                return f"/{self._pattern(match['pattern'], match['flags'])}/{match['flags']}"
            case "range":
                first, last = (regex.escape(_decoded(match[end])) for end in ("first", "last"))
                return f"/{self._class(f'[{first}-{last}]')}/"
            case "import":
                return "\n".join(map(self._imported, match["names"].split(",")))
            case "defined":
                self._current = self._name(match["defined"])
                self._refers.setdefault(self._current, set())
                return self._current
            case "name":
                name = self._name(match["name"])
                self._refers.setdefault(self._current, set()).add(name)
                return name
            case "foreign":
                self.is_foreign = True
        return ""  # a comment or an alias

    def _name(self, name: str) -> str:
        return f"{self._prefix}{'T' if name.isupper() else 'R'}_{name.upper()}"

    def _imported(self, name: str) -> str:
        name, _, alias = (part.strip() for part in name.partition("->"))
        own = self._name(alias or name)
        if name in _COMMON:
            return f"{own}: {_LARK.sub(self.rewritten, _COMMON[name])}"
        return f"%import common.{name} -> {own}"

    def _string(self, text: str, case: str) -> str:
        """Return an expression for `text`. With `case`, its letters match in both cases, but not those of escapes."""
        if not self._in_json:
            return f"{_quoted(text)}{case}"
        parts = [part for part in regex.split(r'(["\\\x00-\x1f])', text) if part]
        terms = [_quoted(_in_json(part)) + ("" if part in _ESCAPED else case) for part in parts]
        return f"({' '.join(terms)})" if terms else '""'

    def _pattern(self, pattern: str, flags: str) -> str:
        """Return the regular expression `pattern`, with groups, operators and anchors as they are."""
        if "x" in flags or regex.search(r"(?<!\\)\(\?[a-zA-Z]*[sx]", pattern):
            raise GrammarError("the flag 'x', and 's' inside of a regular expression, cannot be used")
        rewritten: str = _REGEX.sub(lambda match: self._part(match, flags), pattern) if self._in_json else pattern
        return rewritten

    def _part(self, match: "regex.Match[str]", flags: str) -> str:
        match match.lastgroup:
            case "class" | "named":
                return self._class(match[0])
            case "dot":
                return self._class(r"[\s\S]" if "s" in flags else r"[^\n]")
            case "code":
                character = chr(int(match["hex"], 16))
            case "quoted":
                character = _CONTROLS.get(match["character"], match["character"])
            case "plain":
                character = match[0]
            case _:
                return str(match[0])
        return _code(character) if character in _ESCAPED else match[0]

    def _class(self, text: str) -> str:
        """Return a regular expression for the characters of the class `text`."""
        if not self._in_json:
            return text
        try:
            found = regex.compile(text, regex.V1)
        except regex.error as error:
            raise GrammarError(f"the class {text[:40]} cannot be read ({error})") from None
        codes = [_code(character) for character in _ESCAPED if found.fullmatch(character)]
        return f"(?:{'|'.join([f'[{text}&&{_OTHERS}]', *codes])})" if codes else text


def _decoded(literal: str) -> str:
    """Return the text of a string of a grammar."""
    try:
        return str(json.loads(regex.sub(r"\\x(..)", r"\\u00\1", literal), strict=False))
    except ValueError:
        raise GrammarError(f"the string {literal[:40]} cannot be read") from None


def _code(character: str) -> str:
    """Return a regular expression for `character` as JSON escapes it."""
    return f"(?-i:{regex.escape(_in_json(character))})"


def _in_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
