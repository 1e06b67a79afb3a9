"""The rules, in the order in which they are reported."""

from lockstep_check.rules.age_limit import AgeLimit
from lockstep_check.rules.cache_age import CacheAge
from lockstep_check.rules.checksums import Checksums
from lockstep_check.rules.conservation import Conservation
from lockstep_check.rules.denominator import Denominator
from lockstep_check.rules.length import Length
from lockstep_check.rules.published_first import PublishedFirst
from lockstep_check.rules.reported_age import ReportedAge
from lockstep_check.rules.resumed import Resumed
from lockstep_check.rules.rule import Limit, Rule
from lockstep_check.rules.stamp import Stamp
from lockstep_check.rules.versions_rise import VersionsRise
from lockstep_check.rules.whole_calls import WholeCalls

RULES: tuple[type[Rule], ...] = (
    AgeLimit,
    ReportedAge,
    Stamp,
    Conservation,
    Length,
    VersionsRise,
    PublishedFirst,
    Checksums,
    WholeCalls,
    CacheAge,
    Denominator,
    Resumed,
)

__all__ = ["RULES", "Limit", "Rule"]
