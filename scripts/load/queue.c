// Producers and workers of one queue.
//
// A worker claims jobs, acknowledges all of them at once with their ids from the answer, and claims again. A producer sends
// a batch when the previous one is acknowledged and there is room: jobs that are queued or in flight are bounded, so that
// the queue is never empty and does not grow. At the end the queue is drained, and every job must have come exactly once.
//
// requests[0] is a batch of a producer, requests[1] a claim; its `records` is the maximum number of jobs.
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

#define CLAIM_MAX 64
#define ID_BYTES 96
#define ACK_BYTES 32768
#define EVENTS_MAX 256
#define JOBS_MAX (1L << 27)
#define CLAIM_LATENCY 0
#define ACK_LATENCY 1

typedef struct {
    bool is_producer, idle;
    int job_count;  // claimed, their ack in flight
    char jobs[CLAIM_MAX][ID_BYTES];
    char ack[ACK_BYTES];
} End;

static const Plan *plan;
static Line *lines;
static End *ends;
static int line_count, idle_count, producing;
static bool over;
static long sent, acked;
static uint64_t *handed_out;  // hashes of all job ids
static long handed_out_count, handed_out_room;

static bool drains(void) { return !plan->held; }

static void set_idle(End *end, bool idle) {
    idle_count += idle - end->idle;
    end->idle = idle;
}

static void remember(const char *id) {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a: among ten million ids, a collision has a chance of 1 in 370,000
    for (; *id; id++) hash = (hash ^ (unsigned char)*id) * 0x100000001b3;
    if (handed_out_count == handed_out_room) {
        handed_out_room = handed_out_room ? 2 * handed_out_room : 1 << 16;
        if (handed_out_room > JOBS_MAX) fail("more than %ld jobs", JOBS_MAX);
        handed_out = realloc(handed_out, (size_t)handed_out_room * sizeof *handed_out);
        if (!handed_out) fail("out of memory");
    }
    handed_out[handed_out_count++] = hash;
}

static int by_value(const void *a, const void *b) {
    uint64_t left = *(const uint64_t *)a, right = *(const uint64_t *)b;
    return left < right ? -1 : left > right;
}

static void check_all(void) {
    qsort(handed_out, (size_t)handed_out_count, sizeof *handed_out, by_value);
    long twice = 0;
    for (long i = 1; i < handed_out_count; i++) twice += handed_out[i] == handed_out[i - 1];
    if (twice) fail("%ld of %ld jobs came twice", twice, handed_out_count);
    if (drains() && acked != sent) fail("%ld jobs sent, %ld done", sent, acked);
}

// ---- the protocols: ids in the answer to a claim, the request and the answer of an ack

static void add_job(End *end, const char *id, size_t length) {
    if (end->job_count == CLAIM_MAX || length >= ID_BYTES) fail("a claim with too many jobs, or too long an id");
    memcpy(end->jobs[end->job_count], id, length);
    end->jobs[end->job_count++][length] = 0;
}

static void find_jobs(End *end, const Answers *answers) {
    const char *before = plan->protocol == HTTP ? "\"$seq\":" : " $JS.ACK.";
    const char *after = plan->protocol == HTTP ? "," : " ";
    const char *redis_after = "\r\n*2\r\n$1\r\nd\r\n";  // an id is followed by its fields
    const char *at = answers->kept;
    if (plan->protocol == RESP) {
        for (const char *found; (found = strstr(at, redis_after)); at = found + strlen(redis_after)) {
            const char *id = found;
            while (id > answers->kept && id[-1] != '\n') id--;
            add_job(end, id, (size_t)(found - id));
        }
        return;
    }
    while ((at = strstr(at, before))) {
        at += strlen(before);
        add_job(end, at, strcspn(at, after));
    }
}

static size_t write_ack(const Line *line, End *end) {
    char *out = end->ack, body[ACK_BYTES / 2];
    size_t room = sizeof end->ack, length = 0;
    int count = end->job_count;
    if (plan->protocol == HTTP) {
        size_t size = (size_t)snprintf(body, sizeof body, "{\"node\":\"w%05d\",\"seqs\":[", line->number);
        for (int i = 0; i < count; i++)
            size += (size_t)snprintf(body + size, sizeof body - size, "%s%s", i ? "," : "", end->jobs[i]);
        size += (size_t)snprintf(body + size, sizeof body - size, "]}");
        return (size_t)snprintf(out, room,
                                "POST /v0/topics/%s/ack HTTP/1.1\r\nHost: localhost\r\n"
                                "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                                plan->queue, size, body);
    }
    if (plan->protocol == NATS) {
        for (int i = 0; i < count; i++)
            length += (size_t)snprintf(out + length, room - length, "PUB $JS.ACK.%s _INBOX.%05d 4\r\n+ACK\r\n",
                                       end->jobs[i], line->number);
        return length;
    }
    size_t queue = strlen(plan->queue), group = strlen(plan->group);
    length = (size_t)snprintf(out, room, "*%d\r\n$4\r\nXACK\r\n$%zu\r\n%s\r\n$%zu\r\n%s\r\n", 3 + count, queue,
                              plan->queue, group, plan->group);
    for (int pass = 0; pass < 2; pass++) {
        for (int i = 0; i < count; i++)
            length += (size_t)snprintf(out + length, room - length, "$%zu\r\n%s\r\n", strlen(end->jobs[i]), end->jobs[i]);
        if (!pass)
            length += (size_t)snprintf(out + length, room - length, "*%d\r\n$4\r\nXDEL\r\n$%zu\r\n%s\r\n", 2 + count,
                                       queue, plan->queue);
    }
    return length;
}

static void check_ack(const Answers *answers, int count) {
    char expected[64];
    if (plan->protocol == HTTP) {
        snprintf(expected, sizeof expected, "\"acked\":%d,", count);
        if (!strstr(answers->kept, expected)) fail("%s is not in %s", expected, answers->kept);
    } else if (plan->protocol == RESP) {
        snprintf(expected, sizeof expected, ":%d\r\n:%d\r\n", count, count);
        if (strcmp(answers->kept, expected)) fail("%d jobs, answered by %s", count, answers->kept);
    } else if (answers->status) {
        fail("an ack was refused: %s", answers->kept);
    }
}

// ---- what an end does next

static void produce(Line *line) {
    End *end = line->owner;
    const Step *batch = &plan->steps[0];
    if (over || sent - acked > plan->waiting_max - batch->records) return;
    set_idle(end, false);
    producing++;
    sent += batch->records;
    line->step = 0;
    line_ask(line, plan);
}

static void claim(Line *line) {
    set_idle(line->owner, false);
    line->step = 1;
    line_ask(line, plan);
}

static void after_claim(Line *line) {
    End *end = line->owner;
    const Answers *answers = &line->answers;
    long expected = plan->protocol == NATS && answers->status != 408 ? plan->steps[1].records : 1;
    if (answers->replies < expected) return;
    find_jobs(end, answers);
    if (!end->job_count) {
        if (over && !producing)
            set_idle(end, true);
        else
            claim(line);
        return;
    }
    int64_t now = now_ns();
    latency_keep(CLAIM_LATENCY, now - line->sent_ns);
    for (int i = 0; i < end->job_count; i++) remember(end->jobs[i]);
    answers_reset(&line->answers);
    line->sent_ns = now;
    line_send(line, end->ack, write_ack(line, end));
}

static void after_ack(Line *line) {
    End *end = line->owner;
    int expected = plan->protocol == HTTP ? 1 : plan->protocol == RESP ? 2 : end->job_count;
    if (line->answers.replies < expected) return;
    check_ack(&line->answers, end->job_count);
    latency_keep(ACK_LATENCY, now_ns() - line->sent_ns);
    acked += end->job_count;
    end->job_count = 0;
    if (over && !drains())
        set_idle(end, true);
    else
        claim(line);
}

static void receive(Line *line) {
    End *end = line->owner;
    const char *data;
    size_t size = line_receive(line, &data);
    if (!size) return;
    answers_feed(&line->answers, data, size);
    if (end->is_producer) {
        if (line->answers.replies < plan->steps[0].replies || end->idle) return;
        set_idle(end, true);
        producing--;
        produce(line);
    } else if (end->job_count) {
        after_ack(line);
    } else if (!end->idle) {
        after_claim(line);
    }
}

static void turn(void) {
    struct epoll_event events[EVENTS_MAX];
    int found = epoll_wait(poll_fd, events, EVENTS_MAX, STALLED_S * 1000);
    if (!found) fail("nothing came for %d s; %ld jobs sent, %ld done", STALLED_S, sent, acked);
    if (found < 0 && errno != EINTR) fail("epoll: %s", strerror(errno));
    for (int i = 0; i < found; i++) {
        Line *line = events[i].data.ptr;
        if (events[i].events & EPOLLOUT) line_flush(line);
        if (events[i].events & ~(uint32_t)EPOLLOUT) receive(line);
    }
    for (int i = 0; i < line_count; i++)  // acks have made room
        if (ends[i].is_producer && ends[i].idle) produce(&lines[i]);
}

static void run_for(double seconds) {
    int64_t end = now_ns() + (int64_t)(seconds * SECOND_NS);
    while (now_ns() < end) turn();
}

void run_queue(const Plan *of) {
    plan = of;
    if (plan->step_count != 2 || plan->steps[1].records > CLAIM_MAX) fail("a queue has two requests: a batch and a claim");
    sent = plan->held;
    line_count = plan->clients + plan->producers;
    lines = allocate((size_t)line_count * sizeof(Line));
    ends = allocate((size_t)line_count * sizeof(End));
    for (int i = 0; i < line_count; i++) {
        line_open(&lines[i], plan, i);
        lines[i].owner = &ends[i];
        ends[i].is_producer = i >= plan->clients;
        lines[i].answers.keeps = !ends[i].is_producer;
        set_idle(&ends[i], true);
    }
    for (int i = 0; i < line_count; i++) ends[i].is_producer ? produce(&lines[i]) : claim(&lines[i]);
    run_for(plan->warm_up_s);
    figures_begin(plan);
    long acked_before = acked;
    run_for(plan->seconds);
    int64_t give_up = now_ns() + LONGEST_S * SECOND_NS;
    while (!(latency_count(CLAIM_LATENCY) && latency_count(ACK_LATENCY)) && now_ns() < give_up) run_for(0.1);
    figures_end(plan);
    double jobs = acked - acked_before, acks = latency_count(ACK_LATENCY);
    if (!acks || !latency_count(CLAIM_LATENCY)) fail("no job was done");
    print_begin();
    print_number("jobs_per_s", jobs / figures_seconds(), 1);
    print_number("jobs_per_claim", jobs / acks, 2);
    print_latencies(CLAIM_LATENCY, "");
    print_latencies(ACK_LATENCY, "ack_");
    over = true;
    while (idle_count < line_count) turn();
    check_all();
    print_end(plan, jobs);
}
