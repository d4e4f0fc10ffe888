// N connections, each with one request in flight, which may be a pipeline. A connection goes through the steps of the plan
// again and again: as soon as it has its answer, or, at a pace, when the next request is due.
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define EVENTS_MAX 256

static const Plan *plan;
static Line *lines;
static double left;  // requests that may still be sent
static int resting;  // connections that will send no more
static long answered;
static double records, bytes;
static bool counting;
static int timer_fd = -1;
static int64_t armed_ns;

static void ask(Line *line) {
    if (left < 1) {
        resting++;
        return;
    }
    left--;
    line_ask(line, plan);
}

// Records of pipelines that are answered in part: with slow answers they are a large part of all.
static double records_in_flight(void) {
    double sum = 0;
    for (int i = 0; i < plan->clients; i++) {
        const Step *step = &plan->steps[lines[i].step];
        if (lines[i].in_flight && step->replies > 1)
            sum += (double)step->records * lines[i].answers.replies / step->replies;
    }
    return sum;
}

static void answer_complete(Line *line) {
    const Step *step = &plan->steps[line->step];
    const Answers *answers = &line->answers;
    int64_t now = now_ns();
    if (answers->replies > step->replies)
        fail("connection %d: %ld answers to %ld requests", line->number, answers->replies, step->replies);
    if (step->marks >= 0 && answers->marks != step->marks)
        fail("connection %d: %ld records instead of %ld", line->number, answers->marks, step->marks);
    line->in_flight = false;
    records += step->records;
    if (counting) {
        answered++;
        if (step->timed) latency_keep(0, now - line->sent_ns);
    }
    if (step->marks > 0) {
        line->cursor += (uint64_t)step->marks;
        if (plan->cursor_end && line->cursor >= plan->cursor_end) line->cursor = plan->cursor_first;
    }
    line->topic = (line->topic + 1) % plan->topics;
    line->step = (line->step + 1) % plan->step_count;
    if (!plan->every_ns) {
        ask(line);
        return;
    }
    // The next slot of its own; slots that have passed meanwhile are left out, so there are no bursts.
    line->due_ns += plan->every_ns * ((now - line->due_ns) / plan->every_ns + 1);
}

static void receive(Line *line) {
    const char *data;
    size_t size = line_receive(line, &data);
    if (!size) return;
    bytes += (double)size;
    answers_feed(&line->answers, data, size);
    if (!line->in_flight) {
        if (line->answers.replies > plan->steps[line->step].replies || plan->protocol != NATS)
            fail("connection %d: an answer without a request", line->number);
        return;
    }
    if (line->answers.replies >= plan->steps[line->step].replies) answer_complete(line);
}

// At a pace: send what is due, and wake up for what comes next.
static void ask_due(void) {
    int64_t now = now_ns(), first = INT64_MAX;
    for (int i = 0; i < plan->clients; i++) {
        if (lines[i].in_flight) continue;
        if (lines[i].due_ns <= now)
            ask(&lines[i]);
        else if (lines[i].due_ns < first)
            first = lines[i].due_ns;
    }
    if (first == INT64_MAX || first == armed_ns) return;
    armed_ns = first;
    struct itimerspec at = {.it_value = {first / SECOND_NS, first % SECOND_NS}};
    if (timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &at, NULL)) fail("timer: %s", strerror(errno));
}

// One turn of the loop, no longer than until `until`.
static void turn(int64_t until) {
    struct epoll_event events[EVENTS_MAX];
    int64_t wait_ns = until - now_ns();
    int found = epoll_wait(poll_fd, events, EVENTS_MAX, wait_ns > 0 ? (int)(wait_ns / 1000000) + 1 : 0);
    if (found < 0 && errno != EINTR) fail("epoll: %s", strerror(errno));
    for (int i = 0; i < found; i++) {
        Line *line = events[i].data.ptr;
        if (!line) {
            uint64_t times;
            if (read(timer_fd, &times, sizeof times) > 0) armed_ns = 0;
            continue;
        }
        if (events[i].events & EPOLLOUT) line_flush(line);
        if (events[i].events & ~(uint32_t)EPOLLOUT) receive(line);
    }
    if (plan->every_ns) ask_due();
}

static void run_until(int64_t end) {
    long before = answered;
    double records_before = records, bytes_before = bytes;
    int64_t moved = now_ns();
    for (int64_t now = moved; now < end && resting < plan->clients; now = now_ns()) {
        int64_t stall = moved + STALLED_S * SECOND_NS;
        turn(end < stall ? end : stall);
        if (answered != before || records != records_before || bytes != bytes_before) {
            before = answered, records_before = records, bytes_before = bytes;
            moved = now_ns();
        } else if (now_ns() >= stall && plan->every_ns < STALLED_S * SECOND_NS) {
            fail("nothing came for %d s", STALLED_S);
        }
    }
}

void run_requests(const Plan *of) {
    plan = of;
    if (!plan->step_count) fail("the plan has no request");
    left = plan->most ? (double)plan->most : 1e18;
    lines = allocate((size_t)plan->clients * sizeof(Line));
    for (int i = 0; i < plan->clients; i++) line_open(&lines[i], plan, plan->first_number + i);
    if (plan->every_ns) {
        timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
        struct epoll_event event = {.events = EPOLLIN};
        if (timer_fd < 0 || epoll_ctl(poll_fd, EPOLL_CTL_ADD, timer_fd, &event)) fail("timer: %s", strerror(errno));
    }
    int64_t began = now_ns();
    for (int i = 0; i < plan->clients; i++) {
        Line *line = &lines[i];
        // Connections begin at different topics, places and moments.
        line->topic = (int)((int64_t)i * plan->topics / plan->clients);
        if (plan->cursor_end) {
            uint64_t page = plan->steps[0].marks > 0 ? (uint64_t)plan->steps[0].marks : 1;
            line->cursor += (uint64_t)i * page % (plan->cursor_end - plan->cursor_first);
        }
        line->due_ns = began + plan->every_ns * i / plan->clients;
        if (!plan->every_ns) ask(line);
    }
    if (plan->every_ns) ask_due();
    if (plan->warm_up_s > 0) run_until(began + (int64_t)(plan->warm_up_s * SECOND_NS));
    figures_begin(plan);
    counting = true;
    double records_before = records + records_in_flight(), bytes_before = bytes;
    int64_t end = now_ns() + (int64_t)(plan->seconds * SECOND_NS);
    run_until(end);
    while (!answered && resting < plan->clients && now_ns() < end + LONGEST_S * SECOND_NS)
        run_until(now_ns() + SECOND_NS / 10);
    figures_end(plan);
    if (!latency_count(0)) fail("no answer came");
    double seconds = figures_seconds();
    print_begin();
    print_number("per_s", answered / seconds, 1);
    print_number("records_per_s", (records + records_in_flight() - records_before) / seconds, 1);
    print_number("bytes_per_s", (bytes - bytes_before) / seconds, 0);
    print_latencies(0, "");
    print_end(plan, (double)answered);
}
