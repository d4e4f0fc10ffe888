// The plan, read from stdin: one setting a line, and requests with their bytes.
//
//   mode requests|queue|watch|null    connect 127.0.0.1 8080           protocol http|resp|nats
//   clients 64                        first_number 0                   seconds 5           warm_up 1
//   every_us 2000                     most 1000                        topics 500
//   cursor FIRST END                  cpu ROLE PID                     producers 4
//   waiting_max 2000                  held 0                           queue NAME          group NAME
//   shape lock-step|burst|idle        polls 1                          pause_us 2000
//   request|hello|watcher|opened REPLIES RECORDS MARKS TIMED BYTES     and BYTES bytes, and a line end
//
// In a request, {client} is the connection's number and {topic} the next of the topics, both with five digits and zeros;
// {cursor} has twenty characters, with spaces, as JSON allows; {cursor:0} is the same with zeros. It is a place to read from
// and advances by the records of each answer. {next:0}, also of twenty, counts up with each use.
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LINE_BYTES 256

static const struct {
    const char *name;
    SlotKind kind;
    int width;
    char pad;
} SLOTS[] = {
    {"{client}", CLIENT_SLOT, 5, '0'},     {"{topic}", TOPIC_SLOT, 5, '0'},
    {"{cursor}", CURSOR_SLOT, 20, ' '},    {"{cursor:0}", CURSOR_SLOT, 20, '0'},
    {"{next:0}", NEXT_SLOT, 20, '0'},
};

// Replace each name by room for its number. The sender has counted lengths with that room.
static void find_slots(Step *step, const char *raw, size_t length) {
    step->text = allocate(length + 1024);
    size_t room = length + 1024;
    for (size_t at = 0; at < length;) {
        size_t i = 0, count = sizeof SLOTS / sizeof *SLOTS, name = 0;
        for (; i < count; i++) {
            name = strlen(SLOTS[i].name);
            if (raw[at] == '{' && at + name <= length && !memcmp(raw + at, SLOTS[i].name, name)) break;
        }
        if (step->length + 32 > room) {
            step->text = realloc(step->text, room *= 2);
            if (!step->text) fail("out of memory");
        }
        if (i == count) {
            step->text[step->length++] = raw[at++];
            continue;
        }
        if (step->slot_count == SLOTS_MAX) fail("a request has more than %d numbers", SLOTS_MAX);
        if (!(step->slot_count & (step->slot_count - 1))) {  // grow at powers of two
            size_t more = step->slot_count ? 2 * (size_t)step->slot_count : 1;
            step->slots = realloc(step->slots, more * sizeof(Slot));
            if (!step->slots) fail("out of memory");
        }
        step->slots[step->slot_count++] = (Slot){SLOTS[i].kind, step->length, SLOTS[i].width, SLOTS[i].pad};
        memset(step->text + step->length, '0', (size_t)SLOTS[i].width);
        step->length += (size_t)SLOTS[i].width;
        at += name;
    }
}

static char *read_bytes(size_t size) {
    if (size > REQUEST_BYTES_MAX) fail("a request of %zu bytes", size);
    char *bytes = allocate(size + 1);
    if (fread(bytes, 1, size, stdin) != size || getchar() != '\n') fail("the plan ends within a request");
    return bytes;
}

static void read_step(Step *step, const char *line) {
    size_t size;
    int timed;
    if (sscanf(line, "%*s %ld %ld %ld %d %zu", &step->replies, &step->records, &step->marks, &timed, &size) != 5)
        fail("not a request: %s", line);
    step->timed = timed;
    char *raw = read_bytes(size);
    find_slots(step, raw, size);
    free(raw);
}

static bool read_setting(Plan *plan, const char *name, const char *line) {
    char word[16] = "";
    long long number = 0;
    double real = 0;
    sscanf(line, "%*s %lld", &number);
    sscanf(line, "%*s %lf", &real);
    if (!strcmp(name, "mode")) return sscanf(line, "%*s %15s", plan->mode) == 1;
    if (!strcmp(name, "connect")) return sscanf(line, "%*s %63s %d", plan->host, &plan->port) == 2;
    if (!strcmp(name, "queue")) return sscanf(line, "%*s %63s", plan->queue) == 1;
    if (!strcmp(name, "group")) return sscanf(line, "%*s %63s", plan->group) == 1;
    if (!strcmp(name, "shape")) return sscanf(line, "%*s %15s", plan->shape) == 1;
    if (!strcmp(name, "cursor"))
        return sscanf(line, "%*s %lu %lu", &plan->cursor_first, &plan->cursor_end) == 2;
    if (!strcmp(name, "cpu")) {
        if (plan->pid_count == PIDS_MAX) fail("more than %d processes", PIDS_MAX);
        int at = plan->pid_count++;
        return sscanf(line, "%*s %15s %d", plan->pids[at].role, &plan->pids[at].pid) == 2;
    }
    if (!strcmp(name, "protocol")) {
        sscanf(line, "%*s %15s", word);
        plan->protocol = !strcmp(word, "http") ? HTTP : !strcmp(word, "resp") ? RESP : NATS;
        return plan->protocol != NATS || !strcmp(word, "nats");
    }
    if (!strcmp(name, "opened")) {
        Step step = {0};
        read_step(&step, line);
        if (step.length >= sizeof plan->opened) return false;
        memcpy(plan->opened, step.text, step.length);
        free(step.text);
        free(step.slots);
        return true;
    }
    if (!strcmp(name, "request")) {
        if (plan->step_count == STEPS_MAX) fail("more than %d requests", STEPS_MAX);
        read_step(&plan->steps[plan->step_count++], line);
        return true;
    }
    if (!strcmp(name, "hello")) return read_step(&plan->hello, line), true;
    if (!strcmp(name, "watcher")) {
        if (plan->watcher_count == plan->clients) fail("more watchers than clients");
        if (!plan->watchers) plan->watchers = allocate((size_t)plan->clients * sizeof(Step));
        read_step(&plan->watchers[plan->watcher_count++], line);
        return true;
    }
    if (!strcmp(name, "clients")) return (plan->clients = (int)number) > 0 && number <= CLIENTS_MAX;
    if (!strcmp(name, "first_number")) return (plan->first_number = (int)number) >= 0 && number < 100000;
    if (!strcmp(name, "seconds")) return (plan->seconds = real) > 0;
    if (!strcmp(name, "warm_up")) return (plan->warm_up_s = real) >= 0;
    if (!strcmp(name, "every_us")) return (plan->every_ns = (int64_t)(real * 1000)) >= 0;
    if (!strcmp(name, "pause_us")) return (plan->pause_ns = (int64_t)(real * 1000)) >= 0;
    if (!strcmp(name, "most")) return (plan->most = (long)number) >= 0;
    if (!strcmp(name, "topics")) return (plan->topics = (int)number) > 0 && number <= 100000;
    if (!strcmp(name, "producers")) return (plan->producers = (int)number) >= 0 && number <= CLIENTS_MAX;
    if (!strcmp(name, "waiting_max")) return (plan->waiting_max = (long)number) > 0;
    if (!strcmp(name, "held")) return (plan->held = (long)number) >= 0;
    if (!strcmp(name, "polls")) return plan->polls = number > 0, true;
    return false;
}

Plan *plan_read(void) {
    Plan *plan = allocate(sizeof *plan);
    char line[LINE_BYTES], name[16];
    plan->topics = 1;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "%15s", name) != 1) continue;
        if (!read_setting(plan, name, line)) fail("not a setting: %s", line);
    }
    return plan;
}

int main(void) {
    Plan *plan = plan_read();
    if (!strcmp(plan->mode, "null")) run_null(plan);
    if (!plan->port || !plan->clients || plan->seconds <= 0) fail("the plan lacks an address, clients or seconds");
    if (!strcmp(plan->mode, "requests"))
        run_requests(plan);
    else if (!strcmp(plan->mode, "queue"))
        run_queue(plan);
    else if (!strcmp(plan->mode, "watch"))
        run_watch(plan);
    else
        fail("no mode %s", plan->mode);
    return 0;
}
