{{- /* Labels of an object: (list . "actor"). */ -}}
{{- define "penstock.labels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "penstock.secret" -}}
{{ .Values.existingSecret | default (printf "%s-queue" .Release.Name) }}
{{- end }}

{{- /* What all pods of the run have: no token of the cluster, no variables of other Services. */ -}}
{{- define "penstock.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The pod of all roles but the rewarder: not root, files of volumes are the group's. */ -}}
{{- define "penstock.userOfPod" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "penstock.noRights" -}}
allowPrivilegeEscalation: false
capabilities: {drop: [ALL]}
{{- end }}

{{- /* Where a role finds the queue server, the run's settings, and Secrets whose keys become variables:
(list . secrets). More variables may follow. */ -}}
{{- define "penstock.environment" -}}
{{- $root := index . 0 -}}
envFrom:
  - configMapRef: {name: {{ $root.Release.Name }}-run}
  {{- range index . 1 }}
  - secretRef: {name: {{ . }}}
  {{- end }}
env:
  - {name: REDIS_URL_FILE, value: /secret/url}
  - {name: ACTOR_GRACE_S, value: {{ $root.Values.actors.graceS | quote }}}
  # torchrun kills its processes so long after SIGTERM.
  - {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: {{ sub $root.Values.learner.graceS 10 | max 1 | quote }}}
{{- end }}

{{- /* New pods for new settings. */ -}}
{{- define "penstock.checksum" -}}
checksum/settings: {{ include (print .Template.BasePath "/settings.yaml") . | sha256sum }}
{{- end }}

{{- /* The URL of one user as /secret/url: (list . "actor"). */ -}}
{{- define "penstock.url" -}}
name: url
secret:
  secretName: {{ include "penstock.secret" (index . 0) }}
  defaultMode: 0440
  items: [{key: {{ index . 1 }}.url, path: url}]
{{- end }}

{{- /* Resources with GPUs: (list resources gpus). */ -}}
{{- define "penstock.resources" -}}
{{- $found := deepCopy (index . 0) -}}
{{- if gt (int (index . 1)) 0 -}}
{{- $_ := set $found "limits" (merge (dict "nvidia.com/gpu" (index . 1)) ($found.limits | default dict)) -}}
{{- end -}}
{{- toYaml $found -}}
{{- end }}

{{- define "penstock.place" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
