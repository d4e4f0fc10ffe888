// Connections, and requests in which numbers vary.
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

int poll_fd = -1;

static char received[RECEIVE_BYTES];

static void put_number(char *at, uint64_t value, int width, char pad) {
    char *digit = at + width;
    do {
        *--digit = (char)('0' + value % 10);
        value /= 10;
    } while (value && digit > at);
    while (digit > at) *--digit = pad;
}

static void fill(Line *line, char *text, const Step *step, bool fresh) {
    for (int i = 0; i < step->slot_count; i++) {
        const Slot *slot = &step->slots[i];
        if ((slot->kind == CLIENT_SLOT) == fresh) continue;  // once at the start, or with each request
        uint64_t value = slot->kind == CLIENT_SLOT  ? (uint64_t)line->number
                         : slot->kind == TOPIC_SLOT ? (uint64_t)line->topic
                         : slot->kind == NEXT_SLOT  ? ++line->next
                                                    : line->cursor;
        put_number(text + slot->at, value, slot->width, slot->pad);
    }
}

static char *own_text(Line *line, const Step *step) {
    char *text = allocate(step->length);
    memcpy(text, step->text, step->length);
    fill(line, text, step, false);
    return text;
}

void line_open(Line *line, const Plan *plan, int number) {
    memset(line, 0, sizeof *line);
    line->number = number;
    line->answers.protocol = plan->protocol;
    line->cursor = plan->cursor_first;
    line->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)plan->port)};
    if (inet_pton(AF_INET, plan->host, &address.sin_addr) != 1) fail("%s is not an IPv4 address", plan->host);
    if (line->fd < 0 || connect(line->fd, (struct sockaddr *)&address, sizeof address))
        fail("connection %d to %s:%d: %s", number, plan->host, plan->port, strerror(errno));
    int on = 1;
    setsockopt(line->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (plan->hello.length) {
        char *hello = own_text(line, &plan->hello);
        line_send(line, hello, plan->hello.length);
        line_await(line, "PONG\r\n");
        free(hello);
    }
    for (int i = 0; i < plan->step_count; i++) line->texts[i] = own_text(line, &plan->steps[i]);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = line};
    if (poll_fd < 0) poll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_ctl(poll_fd, EPOLL_CTL_ADD, line->fd, &event)) fail("epoll: %s", strerror(errno));
}

static void want_writable(Line *line, bool wanted) {
    if (line->writable_wanted == wanted) return;
    line->writable_wanted = wanted;
    struct epoll_event event = {.events = EPOLLIN | (wanted ? EPOLLOUT : 0), .data.ptr = line};
    if (epoll_ctl(poll_fd, EPOLL_CTL_MOD, line->fd, &event)) fail("epoll: %s", strerror(errno));
}

void line_flush(Line *line) {
    while (line->sending_len) {
        ssize_t sent = send(line->fd, line->sending, line->sending_len, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno == EAGAIN) break;
        if (sent < 0) fail("connection %d: %s", line->number, strerror(errno));
        line->sending += sent;
        line->sending_len -= (size_t)sent;
    }
    want_writable(line, line->sending_len > 0);
}

// The text must stay as it is until it is sent: one request of a connection is in flight at a time.
void line_send(Line *line, const char *text, size_t length) {
    if (line->sending_len) fail("connection %d: a request follows one that is not sent yet", line->number);
    line->sending = text;
    line->sending_len = length;
    line_flush(line);
}

void line_ask(Line *line, const Plan *plan) {
    const Step *step = &plan->steps[line->step];
    fill(line, line->texts[line->step], step, true);
    answers_reset(&line->answers);
    line->in_flight = true;
    line->sent_ns = now_ns();
    line_send(line, line->texts[line->step], step->length);
}

size_t line_receive(Line *line, const char **data) {
    ssize_t size = recv(line->fd, received, sizeof received, MSG_DONTWAIT);
    if (size < 0 && errno == EAGAIN) return 0;
    if (size <= 0) fail("connection %d was closed: %s", line->number, size ? strerror(errno) : "by the server");
    *data = received;
    return (size_t)size;
}

void line_await(Line *line, const char *text) {
    static char came[1 << 16];
    size_t length = 0;
    while (!memmem(came, length, text, strlen(text))) {
        if (length == sizeof came - 1) fail("%s did not come", text);
        ssize_t size = recv(line->fd, came + length, sizeof came - 1 - length, 0);
        if (size <= 0) fail("connection %d was closed before %s: %.*s", line->number, text, (int)length, came);
        length += (size_t)size;
        if (!strncmp(came, "HTTP/1.1 4", 10) || !strncmp(came, "HTTP/1.1 5", 10) || came[0] == '-')
            fail("refused: %.*s", (int)(length < 500 ? length : 500), came);
    }
}
