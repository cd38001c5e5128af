CREATE TABLE IF NOT EXISTS "public"."outbox" (
    -- The event's identity: message_id of the message, by which a consumer
    -- recognises what it has seen.
    id uuid PRIMARY KEY,

    -- The business object that the event is about. Order is kept per aggregate.
    -- The connector refuses an empty value; here the application hears of it first.
    aggregatetype varchar(255) NOT NULL CHECK (aggregatetype <> ''),
    aggregateid varchar(255) NOT NULL CHECK (aggregateid <> ''),

    -- What happened, such as OrderPaid.
    type varchar(255) NOT NULL,

    -- The message body, sent as stored. jsonb normalises white space, key order and
    -- duplicate keys on the way in; where the exact bytes count, make it json, text or bytea.
    payload jsonb,

    -- The aggregate's version after the event, raised by one in the transaction
    -- that changes it. Consumers see a missing event as a gap.
    version bigint NOT NULL,

    -- The version of the payload's schema.
    schema_version integer NOT NULL DEFAULT 1,

    -- What the payload is to a consumer that missed earlier events: a change, the
    -- whole state, or the end of the aggregate. NULL leaves it unsaid.
    kind text CHECK (kind IN ('delta', 'snapshot', 'tombstone')),

    -- The application's clock, for people and monitoring. Never an order.
    occurred_at timestamptz NOT NULL DEFAULT now(),

    -- Part of the aggregate's identity; empty where there is one tenant.
    tenant text NOT NULL DEFAULT '',

    -- Further message headers: a JSON object of strings, numbers and booleans.
    headers jsonb CHECK (jsonb_typeof(headers) = 'object'),

    -- W3C trace context of the request that caused the event.
    traceparent text,

    -- Two transactions that read the same version and both write the next one have
    -- lost an update: the second fails here instead of being published. It is also
    -- what lets the snapshot order old rows by version: within an aggregate no two
    -- rows are equal, and the order is that of their commits.
    UNIQUE (tenant, aggregatetype, aggregateid, version)
);
