// One writer, and N connections that receive everything it writes: pushed to them, or asked for again after each answer.
//
// lock-step: the writer sends a record when all watchers have seen the previous one and it is acknowledged; the latency to
//            each watcher counts.
// burst:     the writer sends a batch when the previous one is acknowledged and the watchers are on average at most
//            AHEAD_MAX records behind.
// idle:      nothing is written.
// At the end each watcher must have seen each record exactly once.
//
// requests[0] writes one record, requests[1] a batch, requests[2] is the question of watchers that poll.
#include "load.h"

#include <errno.h>
#include <string.h>
#include <sys/epoll.h>
#include <time.h>

#define AHEAD_MAX 300
#define EVENTS_MAX 1024
#define OPENED_AT_ONCE 64  // less than the listen backlog of any server
#define ASK_STEP 2

static const Plan *plan;
static Line *watchers, writer;
static long seen, written;  // in sum over all watchers; by the writer
static int64_t sent_ns;
static bool acknowledged = true, lock_step;

static bool all_seen(void) { return seen >= written * plan->clients; }

static void write_records(int step) {
    writer.step = step;
    written += plan->steps[step].records;
    acknowledged = !plan->steps[step].replies;
    line_ask(&writer, plan);
    sent_ns = writer.sent_ns;
}

static void watcher_received(Line *line, const char *data, size_t size) {
    long found;
    if (plan->polls) {
        long before = line->answers.marks;
        answers_feed(&line->answers, data, size);
        found = line->answers.marks - before;
    } else {
        found = count_marks(data, size);
    }
    if (found) {
        line->cursor += (uint64_t)found;
        seen += found;
        if (lock_step) latency_keep(0, now_ns() - sent_ns);
    }
    if (plan->polls && line->answers.replies >= plan->steps[ASK_STEP].replies) line_ask(line, plan);
}

static void receive(Line *line) {
    const char *data;
    size_t size = line_receive(line, &data);
    if (!size) return;
    if (line != &writer) {
        watcher_received(line, data, size);
        return;
    }
    answers_feed(&writer.answers, data, size);
    if (writer.answers.replies > plan->steps[writer.step].replies) fail("more answers than writes");
    if (writer.answers.replies == plan->steps[writer.step].replies) acknowledged = true;
}

static void turn(int wait_ms) {
    struct epoll_event events[EVENTS_MAX];
    int found = epoll_wait(poll_fd, events, EVENTS_MAX, wait_ms);
    if (!found && wait_ms == STALLED_S * 1000)
        fail("nothing came for %d s; %ld records written, %ld seen by %d watchers", STALLED_S, written, seen, plan->clients);
    if (found < 0 && errno != EINTR) fail("epoll: %s", strerror(errno));
    for (int i = 0; i < found; i++) {
        Line *line = events[i].data.ptr;
        if (events[i].events & EPOLLOUT) line_flush(line);
        if (events[i].events & ~(uint32_t)EPOLLOUT) receive(line);
    }
}

static void drain(void) {
    while (!all_seen() || !acknowledged) turn(STALLED_S * 1000);
}

static void run_for(double seconds) {
    int64_t end = now_ns() + (int64_t)(seconds * SECOND_NS);
    struct timespec pause = {plan->pause_ns / SECOND_NS, plan->pause_ns % SECOND_NS};
    for (int64_t now = now_ns(); now < end; now = now_ns()) {
        if (!strcmp(plan->shape, "idle")) {
            turn((int)((end - now) / 1000000) + 1);
        } else if (lock_step) {
            if (plan->pause_ns) nanosleep(&pause, NULL);  // all processes sleep, and polling watchers wait
            write_records(0);
            drain();
        } else {
            if (acknowledged && written - (double)seen / plan->clients <= AHEAD_MAX) write_records(1);
            turn(STALLED_S * 1000);
        }
    }
}

static void open_watchers(void) {
    watchers = allocate((size_t)plan->clients * sizeof(Line));
    for (int first = 0; first < plan->clients; first += OPENED_AT_ONCE) {
        int end = first + OPENED_AT_ONCE < plan->clients ? first + OPENED_AT_ONCE : plan->clients;
        for (int i = first; i < end; i++) {
            line_open(&watchers[i], plan, plan->first_number + i);
            watchers[i].step = ASK_STEP;
            if (plan->polls)
                line_ask(&watchers[i], plan);
            else if (i < plan->watcher_count)
                line_send(&watchers[i], plan->watchers[i].text, plan->watchers[i].length);
        }
        for (int i = first; plan->opened[0] && i < end; i++) line_await(&watchers[i], plan->opened);
    }
}

static void check_all(void) {
    for (int i = 0; i < plan->clients; i++)
        if ((long)(watchers[i].cursor - plan->cursor_first) != written)
            fail("watcher %d has seen %ld of %ld records", i, (long)(watchers[i].cursor - plan->cursor_first), written);
}

void run_watch(const Plan *of) {
    plan = of;
    bool idle = !strcmp(plan->shape, "idle");
    lock_step = !strcmp(plan->shape, "lock-step");
    if (plan->step_count < (plan->polls ? 3 : idle ? 0 : 2)) fail("a request is missing");
    open_watchers();
    line_open(&writer, plan, plan->first_number + plan->clients);
    run_for(plan->warm_up_s);
    figures_begin(plan);
    long seen_before = seen, written_before = written;
    run_for(plan->seconds);
    figures_end(plan);
    double deliveries = seen - seen_before;
    if (!idle && !deliveries) fail("no record was seen");
    print_begin();
    print_number("deliveries_per_s", deliveries / figures_seconds(), 1);
    print_number("writes_per_s", (written - written_before) / figures_seconds(), 1);
    print_latencies(0, "");
    if (!idle) {
        drain();
        check_all();
    }
    print_end(plan, deliveries);
}
