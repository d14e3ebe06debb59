"""Parts of the site outside of docs/: pages of the root, files that pages link to, a generated reference, formulas.

The reference is made when the site is built and not committed: it says what the parsers and docstrings say, so a copy
could only be the same or wrong.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import reference  # noqa: E402  # it stands beside this file, which mkdocs does not import as part of a package

ROOT_PAGES = {"README.md": "index.md", **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")}}
"""Pages of the root of the checkout, and where they stand on the site."""

FILES = "files"
"""The folder of the site that holds what pages link to outside docs/."""

_LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?\)")
_CODE = re.compile(r"^(?:```[\s\S]*?^```|(?: {4}.*\n)+)|`[^`\n]+`", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Formulas."""
    config.markdown_extensions.append(Formulas())  # type: ignore[arg-type]  # mkdocs passes it on to Markdown, which takes objects
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and let links that leave docs/ lead to the file's place on the site.

    A link to a folder adds a page, so all links are followed here, before mkdocs reads the pages.
    """
    for file in files.documentation_pages():
        if file.abs_src_path and (source := Path(file.abs_src_path)).is_relative_to(ROOT / "docs"):
            file.content_string = _relinked(file.content_string, source.parent, file.src_uri, files, config)
    for name, place in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=_relinked(text, ROOT, place, files, config)))
    for name, text in reference.pages().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    return files


_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(<code>|<span[^>]*><code>)~?")


def on_page_content(html: str, **_: object) -> str:
    """Show names in docstrings, such as those of ``:class:``, as code without the role in front."""
    return _ROLE.sub(r"\1", html)


def _relinked(text: str, folder: Path, place: str, files: Files, config: MkDocsConfig) -> str:
    """A page's text with links that hold on the site.

    Args:
        text: Markdown whose relative links start in ``folder``.
        folder: where the page lies in the checkout.
        place: where it stands on the site.
        files: of the site; what is linked to and is none of them is added.
        config: of the site.
    """

    def follow(match: re.Match[str]) -> str:
        path = (folder / match[1]).resolve()
        if not path.exists() or not path.is_relative_to(ROOT):
            return match[0]  # mkdocs says that there is no such file
        name = path.relative_to(ROOT).as_posix()
        if name in ROOT_PAGES:
            target = ROOT_PAGES[name]
        elif name.startswith("docs/"):
            target = name.removeprefix("docs/")
        else:
            target = _add(name, path, files, config)
        return f"]({'../' * place.count('/')}{target}{match[2] or ''})"

    # Code is left alone.
    pieces, end = [], 0
    for code in _CODE.finditer(text):
        pieces += [_LINK.sub(follow, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*pieces, _LINK.sub(follow, text[end:])])


def _add(name: str, path: Path, files: Files, config: MkDocsConfig) -> str:
    """Carry a file of the checkout along as it is; a folder becomes a page that lists its files."""
    if path.is_dir():
        place = f"{FILES}/{name}.md"
        inner = [each for each in sorted(path.iterdir()) if each.is_file() and not each.name.startswith(".")]
        lines = [f"# {name}/", ""]
        for each in inner:
            _add(f"{name}/{each.name}", each, files, config)
            lines.append(f"- [{each.name}]({path.name}/{each.name}.txt)")
        content: str | bytes = "\n".join(lines) + "\n"
    else:
        # Browsers show text, and download what they do not know.
        place, content = f"{FILES}/{name}.txt", path.read_bytes()
    if files.get_file_from_path(place) is None:
        files.append(File.generated(config, place, content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return place


class Formulas(Extension):
    r"""Formulas as GitHub writes them, a block named ``math`` or inline ``$`x`$``, as MathML, which needs no script.

    ``\tag{3}`` gives a block its number.
    """

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802  # the name is the library's
        """Behind the normalising of white space, which drops placeholders, and before code is recognised."""
        md.preprocessors.register(_Blocks(md), "formula", 28)
        md.inlinePatterns.register(_Inline(r"\$`([^`]+)`\$", md), "formula", 195)


def mathml(formula: str, display: str) -> str:
    """A formula of LaTeX as MathML.

    Raises:
        ValueError: there is a command that was not understood.
    """
    from latex2mathml.converter import convert

    made = str(convert(formula, display=display))
    if unknown := re.search(r"\\[A-Za-z]+", "".join(ElementTree.fromstring(made).itertext())):
        raise ValueError(f"formula '{formula}': {unknown[0]} is not known")
    return made


class _Blocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        def made(match: re.Match[str]) -> str:
            formula = re.sub(r"\\tag\{[^}]*\}", "", match[1])
            number = re.search(r"\\tag\{([^}]*)\}", match[1])
            shown = f'<span class="number">({number[1]})</span>' if number else ""
            block = f'<div class="formula">{mathml(formula, "block")}{shown}</div>'
            return f"\n\n{self.md.htmlStash.store(block)}\n\n"

        return re.sub(r"^```math\n(.*?)^```$", made, "\n".join(lines), flags=re.MULTILINE | re.DOTALL).split("\n")


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: N802
        return self.md.htmlStash.store(mathml(m[1], "inline")), m.start(0), m.end(0)
