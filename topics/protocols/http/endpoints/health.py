"""Health, readiness, metrics, and the OpenAPI document."""

from __future__ import annotations

import functools

import msgspec

from topics.api.responses import records
from topics.link import wire
from topics.link.control_channel import Outage
from topics.link.reports import Readiness, ShardReport
from topics.protocols.http import metrics_text
from topics.protocols.http.call import JSON_TYPE, Call, ask_all, error_response
from topics.protocols.http.exchange import Respond, Response
from topics.protocols.http.openapi import document as openapi

TEXT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_readiness = msgspec.msgpack.Decoder(Readiness)
_report = msgspec.msgpack.Decoder(ShardReport)


def health(call: Call, respond: Respond) -> None:
    services = call.services
    uptime_ms = (services.now_us() - services.started_us) // 1000
    body = records.Health(status="ok", version=services.version, uptime_ms=uptime_ms)
    respond(Response(200, msgspec.json.encode(body)))


def ready(call: Call, respond: Respond) -> None:
    if call.services.draining:
        respond(error_response("shutting_down", "the server is stopping"))
        return

    def done(replies: list[wire.Reply]) -> None:
        shards = [_readiness.decode(reply.body) if reply.code == wire.OK else None for reply in replies]
        respond(_ready_response(shards, call.services.shards.outages))

    ask_all(call, wire.READY, done)


def _ready_response(shards: list[Readiness | None], outages: list[Outage]) -> Response:
    progress = sum(shard.progress for shard in shards if shard is not None) / len(shards)
    waiting = [i for i, shard in enumerate(shards) if shard is None or shard.progress < 1.0]
    if waiting:
        detail: dict[str, object] = {"replay_progress": int(progress * 10_000) / 10_000, "shards": waiting}
        known = {outage.shard: outage for outage in outages if outage.shard in waiting}
        texts = [outage.text for outage in known.values()]
        if starting := [shard for shard in waiting if shard not in known]:
            texts.append(f"shards {starting} are not ready yet")
        if locked := [shard for shard, outage in known.items() if not outage.failures]:
            detail["locked"] = locked
        if failing := [outage for outage in known.values() if outage.failures]:
            detail["failing"] = [
                {"shard": outage.shard, "failures": outage.failures, "reason": outage.reason}
                for outage in failing
            ]
        return error_response("not_ready", "; ".join(texts), detail)
    broken = {i: shard.read_only for i, shard in enumerate(shards) if shard is not None and shard.read_only}
    if broken:
        detail = {
            "replay_progress": 1.0,
            "read_only": True,
            "shards": [{"shard": i, "reason": reason} for i, reason in broken.items()],
        }
        text = f"shards {list(broken)} are read-only after a storage failure; restart the server"
        return error_response("not_ready", text, detail)
    topics = sum(shard.topics for shard in shards if shard is not None)
    body = records.Readiness(status="ready", wal_replay_complete=True, topics=topics)
    return Response(200, msgspec.json.encode(body))


def metrics(call: Call, respond: Respond) -> None:
    services = call.services
    wants_json = JSON_TYPE in call.request.accept

    def done(replies: list[wire.Reply]) -> None:
        reports = [_report.decode(reply.body) for reply in replies if reply.code == wire.OK]
        uptime_ms = (services.now_us() - services.started_us) // 1000
        covers = call.key.covers if call.key is not None else lambda name: True
        streams = services.streams.count + sum(report.streams_elsewhere for report in reports)
        failing = sum(outage.failures > 0 for outage in services.shards.outages)
        totals = metrics_text.Totals(
            reports,
            len(replies),
            uptime_ms,
            services.shards.refused_full,
            streams,
            covers,
            services.pressure(),
            failing,
        )
        if not wants_json:
            respond(Response(200, metrics_text.as_text(totals), TEXT_TYPE))
            return
        body = metrics_text.as_json(totals)
        body["performance"] = {"server_total_ms": round(call.total_ms, 3)}
        respond(Response(200, msgspec.json.encode(body)))

    ask_all(call, wire.METRICS, done)


@functools.cache
def _document(version: str) -> bytes:
    return msgspec.json.encode(openapi.document(version))


def open_api(call: Call, respond: Respond) -> None:
    respond(Response(200, _document(call.services.version)))
