"""What a secret looks like: detect-secrets' patterns of tokens with a form of their own, and some it has not.

Sessions are full of code, so every pattern must nearly never hit code. Of detect-secrets' plugins these are left
out on purpose:

- high-entropy strings and keywords: hashes, base64 data and `password = getPassword()` all over ordinary code;
- Artifactory (`AP` + one of A-F + 8 letters is any word such as "APACHE…"), IBM Cloud IAM, IBM COS, Cloudant and
  SoftLayer (any `key: <hash>`), public IP addresses (version numbers; no secret);
- private key, JSON web token, basic auth, npm: only the header line, or all but the signature, or values without
  `$` and `!`, or a quadratic search; replaced by patterns below.

Its plugins are used as patterns, not through `analyze_string`: that returns captured groups, which for GitHub and
GitLab is the prefix and not the token. Verification over the network is never done.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

_NOT_INSIDE_A_WORD = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))"  # a newline may be escaped: text inside JSON text
_REST_OF_TOKEN = r"[A-Za-z0-9_\-]*"


@dataclass(frozen=True)
class Pattern:
    kind: str
    regex: re.Pattern[str]
    hints: tuple[str, ...]
    """The text is searched only if it holds one of these: keeps a megabyte of session well below a second."""
    accept: Callable[[str], bool] = lambda value: True
    """A last look at the found value (the group `value` where the pattern has one)."""
    contextual: bool = False
    """Known by what stands around it only; the value is then looked for everywhere."""


def _digit_and_letter(value: str) -> bool:
    return any(c.isdigit() for c in value) and any(c.isalpha() for c in value)


def _random_looking(value: str) -> bool:
    """Digits and letters, and a stretch of at least 16 of them: no kebab-case word."""
    longest = max((len(part) for part in re.split(r"[^A-Za-z0-9]", value)), default=0)
    return sum(c.isdigit() for c in value) >= 2 and any(c.isalpha() for c in value) and longest >= 16


def _literal_value(value: str) -> bool:
    """A value, not a template, a variable or a call; not redacted already."""
    return not value.startswith(("$", "{", "<", "%", "*", "[REDACTED:", "..."))


def _secret_value(value: str) -> bool:
    code = any(mark in value for mark in ("(", "${", "process.env", "os.environ", "REDACTED:"))
    return _literal_value(value) and _digit_and_letter(value) and not code


@cache
def patterns() -> tuple[Pattern, ...]:
    """All patterns, in the order in which they are applied."""
    return (*_blocks(), *_plugin_patterns(), *_own_tokens(), *_contextual())


def _regexes(plugin: Any) -> list[re.Pattern[str]]:
    return list(plugin.denylist)


def _plugin_patterns() -> list[Pattern]:
    from detect_secrets.plugins.aws import AWSKeyDetector
    from detect_secrets.plugins.azure_storage_key import AzureStorageKeyDetector
    from detect_secrets.plugins.discord import DiscordBotTokenDetector
    from detect_secrets.plugins.github_token import GitHubTokenDetector
    from detect_secrets.plugins.gitlab_token import GitLabTokenDetector
    from detect_secrets.plugins.mailchimp import MailchimpDetector
    from detect_secrets.plugins.openai import OpenAIDetector
    from detect_secrets.plugins.pypi_token import PypiTokenDetector
    from detect_secrets.plugins.sendgrid import SendGridDetector
    from detect_secrets.plugins.slack import SlackDetector
    from detect_secrets.plugins.square_oauth import SquareOAuthDetector
    from detect_secrets.plugins.stripe import StripeDetector
    from detect_secrets.plugins.telegram_token import TelegramBotTokenDetector
    from detect_secrets.plugins.twilio import TwilioKeyDetector

    gitlab = ("glpat-", "gldt-", "glft-", "glsoat-", "glrt-", "GR1348941", "glcbt-", "glimt-", "glptt-", "glagent-",
              "gloas-")  # fmt: skip
    # kind, plugin, hints, whether a token must not begin inside a word (for forms that text can hold by chance)
    table: list[tuple[str, Any, tuple[str, ...], bool]] = [
        ("github-token", GitHubTokenDetector, ("ghp_", "gho_", "ghu_", "ghs_", "ghr_"), False),
        ("gitlab-token", GitLabTokenDetector, gitlab, False),
        ("openai-api-key", OpenAIDetector, ("T3BlbkFJ",), False),
        ("pypi-token", PypiTokenDetector, ("pypi-",), False),
        ("sendgrid-api-key", SendGridDetector, ("SG.",), True),
        ("slack-token", SlackDetector, ("xox", "XOX", "hooks.slack.com"), False),
        ("square-oauth-secret", SquareOAuthDetector, ("sq0csp-",), False),
        ("stripe-key", StripeDetector, ("k_live_",), False),
        ("azure-storage-key", AzureStorageKeyDetector, ("AccountKey=",), False),
        ("mailchimp-key", MailchimpDetector, ("-us",), True),
        ("twilio-key", TwilioKeyDetector, ("AC", "SK"), True),
        ("telegram-bot-token", TelegramBotTokenDetector, (":",), True),
        ("discord-bot-token", DiscordBotTokenDetector, (".",), True),
    ]
    key_id, secret_key = _regexes(AWSKeyDetector)
    found = [
        Pattern("aws-access-key", re.compile(key_id.pattern), ("AKIA", "ASIA", "A3T", "ABIA", "ACCA")),
        Pattern(
            "aws-secret-key",
            re.compile(
                secret_key.pattern.replace("([0-9a-zA-Z/+]", "(?P<value>[0-9a-zA-Z/+]"), secret_key.flags
            ),
            ("aws", "AWS", "Aws"),
            contextual=True,
        ),
    ]
    for kind, plugin, hints, strict in table:
        for regex in _regexes(plugin):
            start, end = (_NOT_INSIDE_A_WORD, "(?![A-Za-z0-9])") if strict else ("", _REST_OF_TOKEN)
            found.append(Pattern(kind, re.compile(f"{start}(?:{regex.pattern}){end}", regex.flags), hints))
    return found


def _blocks() -> list[Pattern]:
    # At least 64 characters of key material: code that merely names the header is left alone. The body may be
    # numbered, quoted, indented or have its newlines escaped; a block whose end was cut off counts too.
    body = r"(?:(?!-----)[A-Za-z0-9+/=\s\\:,.\"'→|*-]){64,20000}"
    header = r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----"
    end = r"(?:-----END (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----)?"
    putty = r"PuTTY-User-Key-File-[23]:(?:.|\n){0,4000}?Private-MAC: [0-9a-f]+"
    return [
        Pattern("private-key", re.compile(header + body + end), ("PRIVATE KEY",)),
        Pattern("private-key", re.compile(putty), ("PuTTY-User-Key-File",)),
        Pattern(
            "json-web-token",
            re.compile(r"eyJ[A-Za-z0-9_-]{8,1000}\.eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
            ("eyJ",),
        ),
    ]


def _own_tokens() -> list[Pattern]:
    def own(
        kind: str, regex: str, *hints: str, accept: Callable[[str], bool] = lambda value: True
    ) -> Pattern:
        return Pattern(kind, re.compile(regex), hints, accept)

    inside = _NOT_INSIDE_A_WORD
    return [
        own("huggingface-token", r"(?:hf|api_org)_[A-Za-z0-9]{30,}", "hf_", "api_org_"),
        own("anthropic-api-key", r"sk-ant-[A-Za-z0-9_-]{16,}", "sk-ant-"),
        own("api-key", r"sk-(?:proj|svcacct|admin|or)-[A-Za-z0-9_-]{20,}", "sk-", accept=_random_looking),
        own("api-key", inside + r"sk-[A-Za-z0-9_-]{20,}", "sk-", accept=_random_looking),
        own("github-token", r"github_pat_[A-Za-z0-9_]{22,}", "github_pat_"),
        own(
            "slack-token",
            r"(?:xox[a-z](?:\.xox[a-z])?|xapp)-[A-Za-z0-9-]{10,}",
            "xox",
            "xapp-",
            accept=_digit_and_letter,
        ),
        own("google-api-key", r"AIza[0-9A-Za-z_-]{35}", "AIza"),
        own("google-oauth-token", inside + r"(?:ya29\.|GOCSPX-)[0-9A-Za-z_-]{20,}", "ya29.", "GOCSPX-"),
        own("npm-token", r"npm_[A-Za-z0-9]{36,}", "npm_"),
        own("stripe-key", r"(?:sk|rk)_(?:live|test)_[0-9A-Za-z]{16,}", "k_live_", "k_test_"),
        own("stripe-key", inside + r"whsec_[0-9A-Za-z+/=]{24,}", "whsec_"),
        own("api-key", inside + r"(?:gsk|xai|pplx|r8|nvapi|tvly|fw|dop_v1|lin_api|figd)[_-][A-Za-z0-9_-]{32,}",
            "gsk_", "xai-", "pplx-", "r8_", "nvapi-", "tvly-", "fw_", "dop_v1_", "lin_api_", "figd_",
            accept=_random_looking),
        own("age-secret-key", r"AGE-SECRET-KEY-1[A-Z0-9]{50,}", "AGE-SECRET-KEY-"),
    ]  # fmt: skip


def _contextual() -> list[Pattern]:
    names = (
        r"(?:secret|token|password|passwd|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
    )
    lower = (
        "secret", "token", "pass", "key", "cred", "SECRET", "TOKEN", "PASS", "KEY", "CRED", "Secret", "Token",
        "Pass", "Key", "Cred",
    )  # fmt: skip
    return [
        # //user:password@host; not host:port@, not ${templates}.
        Pattern(
            "url-password",
            # Up to the last @ before the host: a password may hold one.
            re.compile(r"://[^\s/:@\"'`<>\\]{0,100}:(?P<value>[^\s/\"'`<>\\]{3,200})@[A-Za-z0-9\[]"),
            ("://",),
            _literal_value,
            contextual=True,
        ),
        Pattern(
            "authorization-header",
            re.compile(r"\b(?:[Bb]earer|BEARER)[ :]+(?P<value>[A-Za-z0-9._~+/=-]{16,})"),
            ("earer", "EARER"),
            _digit_and_letter,
            contextual=True,
        ),
        Pattern(
            "authorization-header",
            re.compile(
                r"(?i)authorization[\"']?\s*[:=]\s*[\"']?(?:basic|token)\s+(?P<value>[A-Za-z0-9+/=_-]{8,})"
            ),
            ("uthorization", "UTHORIZATION"),
            contextual=True,
        ),
        Pattern(
            "api-key",
            re.compile(
                r"(?i)\bx-(?:api-key|auth-token)\\?[\"']?\s*[:=]\s*\\?[\"']?(?P<value>[A-Za-z0-9._~+/=-]{8,})"
            ),
            ("-Key", "-key", "-KEY", "-Token", "-token", "-TOKEN"),
            _secret_value,
            contextual=True,
        ),
        # As in ~/.aws/credentials: detect-secrets' own pattern wants quotes.
        Pattern(
            "aws-secret-key",
            re.compile(
                r"(?i)aws_?secret_?access_?key\\?[\"']?\s*[:=]\s*\\?[\"']?(?P<value>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])"
            ),
            ("aws", "AWS", "Aws"),
            contextual=True,
        ),
        # curl -u name:password, and the password of a .netrc entry.
        Pattern(
            "command-password",
            re.compile(
                r"\bcurl\b[^\n|;&]{0,400}?\s(?:-u|--user)[ =]?\\?[\"']?[^\s:\"'\\]{1,100}:(?P<value>[^\s\"'\\]{3,200})"
            ),
            ("curl",),
            _literal_value,
            contextual=True,
        ),
        Pattern(
            "netrc-password",
            re.compile(
                r"\bmachine\s+\S{1,200}\s+login\s+\S{1,200}\s+password\s+(?P<value>[^\s\"'\\]{3,200})"
            ),
            ("machine",),
            _literal_value,
            contextual=True,
        ),
        # password: value at the end of a line, as in YAML, the value unquoted.
        Pattern(
            "password-field",
            re.compile(
                rf"(?i)(?:^|\n|(?<=\\n))[ \t-]*[\w-]{{0,40}}{names}:[ \t]+"
                r"(?P<value>[^\s\"'#{}\[\]&*!|>%@`,;()\\.]{8,200})"
                r"[ \t]*(?=$|\n|\\n|#)"
            ),
            lower,
            lambda value: _secret_value(value) and _hard_to_guess(value),
            contextual=True,
        ),
        Pattern("npm-token", re.compile(r"_authToken\s*=\s*(?P<value>[^\s\"'$]{20,})"), ("_authToken",)),
        # NAME_TOKEN=value as in .env files and exports: capitals only, so that code is left alone.
        Pattern(
            "environment-secret",
            re.compile(
                r"\b(?:[A-Z0-9]+_)*(?:SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|SECRET_KEY|ACCESS_KEY|PRIVATE_KEY)"
                r"[ ]?[=:][ ]?[\"']?(?P<value>[^\s\"'`;,)]{8,})"
            ),
            ("SECRET", "TOKEN", "PASS", "KEY"),
            _secret_value,
            contextual=True,
        ),
        # "password": "value" as in JSON and YAML text; the value quoted, and with digits and letters.
        Pattern(
            "password-field",
            re.compile(
                rf"(?i){names}\\?[\"']?\s*[:=]\s*\\?[\"'](?P<value>[^\s\"'`<>{{}}()\\]{{8,200}})\\?[\"']"
            ),
            lower,
            lambda value: _secret_value(value) and _hard_to_guess(value),
            contextual=True,
        ),
    ]


def _hard_to_guess(value: str) -> bool:
    """No path, URL, dotted name or placeholder: `"token": "tokens/v2.json"` and `"key": "ctrl+shift+p2"` stay."""
    return not re.search(r"^(?:https?:|[./~@#])|[+/ ].*[+/ ]|\.[A-Za-z]+$|^[a-z]+(?:[-_.][a-z0-9]+)+$", value)


SECRET_NAMES = re.compile(
    r"(?i)^(?:.*[_-])?(?:secret|password|passwd|passphrase|api[_-]?key|access[_-]?key|secret[_-]?key|private[_-]?key"
    r"|(?:access|refresh|auth|bearer|api)[_-]?token|client[_-]?secret)$"
)
"""Keys of objects (tool arguments, environment tables) whose text value is a secret."""

is_secret_value = _secret_value

EMAIL = re.compile(
    r"(?:(?<=\\[nrt])|(?<![A-Za-z0-9._%+-])(?!(?<=\\)[nrt]))"  # an escaped newline is no part of the name
    r"(?!git@)[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.)+"
    # Endings in use for mail; `a@b.shape` and `icon@2x.png` are no addresses.
    r"(?:[A-Za-z]{2}|com|org|net|edu|gov|mil|int|info|biz|name|dev|app|tech|cloud|online|site|email|mail|works"
    r"|company|agency|studio|world|systems|software|engineering|science|blog|page|xyz|pro|museum|local|example)"
    r"(?![A-Za-z0-9-])"
)

HOME = re.compile(
    r"(?:(?<![\w.~-])|(?<=\\[nrt]))(?:(?:/mnt/[a-z])?/(?:(?P<mac>Users)|home)/(?P<unix>[A-Za-z0-9._-]*[A-Za-z0-9_])"
    r"(?P<slash>(?=:?/))?"
    # Escaped in a URL: %2FUsers%2Fanna%2Fcode.
    r"|%2[Ff](?:Users|home)%2[Ff](?P<escaped>[A-Za-z0-9._-]*[A-Za-z0-9_])"
    r"|[A-Za-z]:(?:\\\\|\\|/)Users(?:\\\\|\\|/)(?P<windows>[A-Za-z0-9._-]+))"
)
