"""The software bill of materials (SBOM) of a wheel, as CycloneDX JSON: what it requires, and what it was built with."""

from __future__ import annotations

import hashlib
import uuid
import zipfile
from collections.abc import Iterable
from datetime import datetime, timezone
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import NamedTuple

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement

_LINKED_IN = ("nanobind",)
"""Build tools whose code is in the extension, so that a hole in them is one in the wheel."""


class Tool(NamedTuple):
    """What a wheel was built with; ``package`` is whether it came from the index of Python packages."""

    name: str
    version: str
    package: bool


def metadata_of(wheel: Path) -> Message:
    """Return the core metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def bill_of(wheel: Path, tools: Iterable[Tool], epoch: int) -> str:
    """Return the SBOM of a wheel; two calls with the same arguments return the same text.

    Direct dependencies are components of scope ``required``; the range that longshore asks for is a property, since the
    version is known only where it is installed. Build tools are of scope ``excluded``, as what is not there at run
    time, but for those whose code is in the extension.

    Args:
        wheel: its metadata and its hash are read.
        tools: what built it.
        epoch: seconds since 1970 that it is dated to.
    """
    metadata, digest = metadata_of(wheel), hashlib.sha256(wheel.read_bytes()).hexdigest()
    subject = Component(
        name=metadata["Name"],
        version=metadata["Version"],
        type=ComponentType.LIBRARY,
        bom_ref=wheel.name,
        description=metadata["Summary"],
        licenses=[LicenseExpression(metadata["License-Expression"])],
        purl=PackageURL(
            "pypi", name=metadata["Name"], version=metadata["Version"], qualifiers={"file_name": wheel.name}
        ),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    bill = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest),
        metadata=BomMetaData(component=subject, timestamp=datetime.fromtimestamp(epoch, tz=timezone.utc)),
    )
    required = [
        _dependency(Requirement(each)) for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each
    ]
    built_with = [_tool(each) for each in tools]
    for each in (*required, *built_with):
        bill.components.add(each)
    inside = [each for each in built_with if each.scope is ComponentScope.REQUIRED]
    bill.register_dependency(subject, [*required, *inside])
    text = JsonV1Dot6(bill).output_as_string(indent=2) + "\n"
    wrong = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if wrong is not None:
        # Its other lines are the whole schema.
        raise ValueError(f"the SBOM of {wheel.name} is no CycloneDX 1.6: {str(wrong).splitlines()[0]}")
    return text


def _dependency(requirement: Requirement) -> Component:
    return Component(
        name=requirement.name,
        type=ComponentType.LIBRARY,
        scope=ComponentScope.REQUIRED,
        bom_ref=f"requires {requirement}",
        purl=PackageURL("pypi", name=requirement.name),
        properties=[Property(name="longshore:requires", value=str(requirement))],
    )


def _tool(tool: Tool) -> Component:
    inside = tool.name in _LINKED_IN
    return Component(
        name=tool.name,
        version=tool.version,
        type=ComponentType.LIBRARY if inside else ComponentType.APPLICATION,
        scope=ComponentScope.REQUIRED if inside else ComponentScope.EXCLUDED,
        bom_ref=f"built with {tool.name} {tool.version}",
        purl=PackageURL("pypi", name=tool.name, version=tool.version) if tool.package else None,
        properties=[Property(name="longshore:built-with", value=f"{tool.name} {tool.version}")],
    )
